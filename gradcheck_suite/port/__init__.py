"""Is this JAX model the torch model? The map of the parameters, where the two part, and why.

From the ground up: `result` (a `core.results.Result`) and `number_sets` are data; `pair` is
what the author gives; `torch_program` and `jax_program` are the two sides as programs; `mapping`
tells which element comes from where; `matching` tells which results of torch the port has;
`variants` and `search` try changes of the torch program; `gradients`, `running_statistics` and
`updates` judge what training adds; `drawing` draws inputs; `judge` keeps the order.
"""
