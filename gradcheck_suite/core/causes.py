"""The one table of causes: what a JAX port differs by from its torch model, and what to do.

Console, JSON, `--accept`, SARIF and the documents' table read it. To add a cause: a row here, and
where it is tried in `port`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """What a port differs by.

    Attributes:
        name: of the cause, or `unknown`.
        meaning: as a clause that completes "the cause is that ..." or names the thing.
        remedy: what to change in the port.
    """

    name: str
    meaning: str
    remedy: str


_ROWS = (
    Cause("activation", "another activation function", "use torch's activation"),
    Cause(
        # `jax.image.resize` has no `align_corners`: it always resizes between half-pixel centers
        "align-corners",
        "corners aligned or half-pixel centers in resizing",
        "compute the positions as align_corners of torch says",
    ),
    Cause(
        "amsgrad",
        "the maximum of second moments (amsgrad)",
        "use optax.amsgrad or optax.adam as torch does",
    ),
    Cause(
        "average-window",
        "other windows of a pooling, or padding and border counted differently in an average",
        "average over torch's windows, and divide by the count that torch divides by",
    ),
    Cause("axis", "a sum or mean over another axis", "reduce over torch's axis"),
    Cause(
        # a torch module has a mode, a JAX model an argument
        "batch-statistics",
        "batch or running statistics",
        "use those that torch uses in this mode",
    ),
    Cause("betas", "other decay rates of the moments", "pass torch's betas as b1 and b2"),
    Cause(
        "bias-correction",
        "moments with or without bias correction",
        "correct both moments as torch does",
    ),
    Cause(
        "blocks-swapped",
        "blocks of an axis, such as gates or heads, in another order",
        "reorder the blocks in load",
    ),
    Cause(
        "centered",
        "the mean gradient subtracted (centered RMSprop)",
        "use optax.rmsprop(centered=...) as torch does",
    ),
    Cause("class-weights", "class weights in the loss", "pass the class weights to the loss"),
    Cause(
        # `optax.clip_by_global_norm` divides by the norm alone, `torch.nn.utils.clip_grad_norm_` by
        # the norm and 1e-6
        "clip-epsilon",
        "clipping without torch's 1e-6 beside the norm",
        "scale by limit / (norm + 1e-6), or accept it",
    ),
    Cause(
        "clip-order",
        "clipping at another place in the chain",
        "clip the gradients before the optimizer reads them",
    ),
    Cause(
        "clipping",
        "clipping that the other side has not, or of another kind",
        "clip as the torch loop does",
    ),
    Cause("comparison", "a comparison that includes or excludes equality", "compare as torch does"),
    Cause(
        "conjugated",
        "complex numbers conjugated, or their parts exchanged",
        "take the sign of the imaginary part from torch",
    ),
    Cause("constant", "another constant", "use torch's constant"),
    Cause("count", "a mean over another count", "divide by torch's count"),
    Cause(
        "cumulative-sum",
        "a cumulative sum with or without the element itself, or from the other end",
        "accumulate as torch does",
    ),
    Cause(
        "custom-gradient",
        "a rule for the gradient of its own (custom_vjp, custom_jvp) that is wrong",
        "correct the backward rule",
    ),
    Cause(
        "decay-mask",
        "weight decay on other parameters",
        "mask the decay as torch's parameter groups do",
    ),
    # 0.99 by default in torch's RMSprop, and 0.9 in optax's
    Cause("decay-of-squares", "another decay rate of the squares", "pass torch's alpha as decay"),
    Cause(
        "decoupled-decay",
        "weight decay coupled with the gradient, or decoupled",
        "decay as torch does: adamw, or added decay",
    ),
    Cause(
        "decay-place",
        "weight decay at another place of the update",
        "apply the decay where torch does",
    ),
    # `optax.sgd` has no dampening
    Cause("dampening", "another dampening of the momentum", "scale the gradient by 1 - dampening"),
    Cause("dilation", "another dilation of the kernel", "pass rhs_dilation as torch does"),
    Cause("dropout-active", "dropout that is active in evaluation", "pass deterministic=True"),
    Cause(
        "embedding-scale",
        "embeddings scaled by the width or its root",
        "scale the embeddings as torch does",
    ),
    Cause(
        "empty-segment",
        "another value of a segment that no element belongs to",
        "put torch's value where a segment is empty",
    ),
    # 1e-5 in torch's layer norm and 1e-6 in flax's, by default
    Cause("eps", "a different epsilon", "pass torch's eps"),
    Cause("eps-place", "epsilon added outside of the root, or inside", "add eps where torch does"),
    Cause(
        # `optax.rmsprop` adds it inside by default, torch outside
        "eps-inside-root",
        "epsilon of the optimizer inside of the root, or outside",
        "set eps_in_sqrt or eps_root as torch does",
    ),
    Cause(
        "eps-before-correction",
        "epsilon of the optimizer added before the bias correction",
        "add eps after it",
    ),
    Cause("extra-activation", "an activation that torch does not have", "remove it"),
    Cause("extra-softmax", "a softmax that torch does not have", "remove it"),
    Cause("extra-norm", "a normalization that torch does not have", "remove it"),
    Cause(
        # `jax.nn.gelu` approximates by default, `torch.nn.functional.gelu` does not
        "gelu-approximation",
        "the tanh or erf form of gelu",
        "pass approximate=False or True as torch does",
    ),
    Cause("gradient-scaled", "a gradient with another factor", "remove the factor"),
    Cause("group-order", "channels grouped in another order", "group neighbouring channels"),
    Cause("groups", "another number of groups", "use torch's number of groups"),
    Cause(
        "gru-bias", "the recurrent bias of the new gate outside of the reset gate", "add it inside"
    ),
    Cause(
        # torch and cuDNN apply it to the product, the paper to the state before it (Cho et al.
        # 2014)
        "gru-reset-gate",
        "the reset gate before the recurrent product, or after",
        "apply it as torch does",
    ),
    Cause("halves-swapped", "the two halves of an axis exchanged", "swap the two halves"),
    Cause(
        "ignore-index",
        "ignored targets (padding, ignore_index) counted otherwise",
        "divide by the targets that count",
    ),
    Cause("index-offset", "an index or position with an offset", "start where torch starts"),
    Cause("index-reversed", "positions from the other end", "count from torch's end"),
    Cause(
        # 0.1 by default in `optax.adagrad`, and 0 in torch's
        "initial-accumulator",
        "another start of an accumulator or an average",
        "start it at torch's value",
    ),
    Cause(
        # what torch calls a convolution is a correlation; `jnp.convolve` flips its kernel
        "kernel-flipped",
        "the kernel flipped: convolution in place of correlation",
        "flip the kernel in load",
    ),
    # torch has output channels first, flax has them last
    Cause("kernel-transposed", "axes of the kernel exchanged", "transpose the kernel in load"),
    Cause("label-smoothing", "another label smoothing", "smooth over all classes, as torch does"),
    Cause(
        "layer-for-rms-norm",
        "layer norm in place of RMS norm: the mean is subtracted",
        "do not subtract the mean",
    ),
    Cause("learning-rate", "another learning rate or schedule", "pass torch's learning rate"),
    Cause(
        "load",
        "a leaf of the parameters that is not loaded as torch has it",
        "load it from torch's state",
    ),
    Cause("loss-kind", "another loss", "use torch's loss"),
    Cause(
        "loss-threshold", "another threshold of the loss (beta, delta)", "pass torch's threshold"
    ),
    Cause("mask-diagonal", "the mask shifted by a position", "shift the diagonal"),
    Cause(
        "mask-elements", "a mask that hides other elements", "mask the elements that torch masks"
    ),
    Cause("mask-polarity", "the mask inverted: what is to be seen is masked", "invert the mask"),
    Cause("mask-transposed", "the mask transposed", "transpose it"),
    Cause(
        "mask-value", "another value at masked positions", "use -inf, or the value that torch uses"
    ),
    Cause(
        "mask-window",
        "a window of the mask that is one position wider or narrower",
        "compare as torch does",
    ),
    Cause(
        "merged-biases",
        "two biases that torch trains are one: its step is that of one",
        "keep both, or double its step",
    ),
    Cause("missing-activation", "an activation is missing", "apply it"),
    Cause("missing-bias", "a bias is missing", "add the bias"),
    Cause(
        "missing-clipping", "no clipping", "chain optax.clip_by_global_norm before the optimizer"
    ),
    Cause(
        "missing-custom-gradient",
        "no gradient of its own where torch has an autograd.Function with another backward",
        "give it torch's backward by jax.custom_vjp",
    ),
    Cause("missing-mask", "no mask", "apply the mask as torch does"),
    Cause(
        "missing-norm",
        "a normalization is missing or stands elsewhere",
        "normalize where torch does",
    ),
    Cause("missing-operation", "an operation of torch is missing", "add it"),
    Cause("missing-root", "the square or the variance in place of its root", "take the root"),
    Cause("missing-scale", "a factor is missing", "multiply by it"),
    Cause("missing-softmax", "no softmax", "apply softmax"),
    Cause(
        "missing-stop-gradient",
        "no stop_gradient where torch detaches: an extra gradient",
        "apply jax.lax.stop_gradient",
    ),
    Cause("missing-term", "a term such as a residual (skip connection) is missing", "add it"),
    Cause(
        "missing-transpose", "axes not exchanged before a reshape", "transpose before the reshape"
    ),
    Cause("momentum", "another momentum", "pass torch's momentum"),
    Cause(
        # torch's momentum is the share of the new value, flax's that of the old one
        "momentum-convention",
        "old and new value exchanged, or momentum as an average",
        "use 1 - momentum of torch",
    ),
    Cause("missing-weight-decay", "no weight decay", "add the weight decay"),
    Cause("nesterov", "Nesterov momentum on one side alone", "pass nesterov as torch does"),
    Cause(
        "no-gradient",
        "no gradient at all where torch has one",
        "look for stop_gradient, a cast or a closed-over parameter",
    ),
    Cause("norm-axis", "normalization over another axis", "normalize over torch's axes"),
    Cause(
        "norm-order",
        "norm before the sublayer or after it (pre-norm, post-norm)",
        "normalize where torch does",
    ),
    Cause(
        "not-loaded",
        "a parameter that is not loaded: the leaf stays at its initial value",
        "load it from torch's state",
    ),
    Cause(
        "not-updated", "running statistics that are not updated", "return the updated statistics"
    ),
    Cause("one-minus", "1 - x in place of x", "exchange the two weights"),
    Cause("operands-swapped", "the operands in the other order", "swap the operands"),
    Cause("optimizer-eps", "a different epsilon of the optimizer", "pass torch's eps"),
    Cause("optimizer-kind", "another optimizer", "use torch's optimizer"),
    Cause("order", "two operations in the other order", "apply them in torch's order"),
    Cause("order-of-elements", "elements in another order", "reorder them"),
    Cause("order-of-parts", "parts joined in the other order", "join them in torch's order"),
    Cause("other-input", "another input in its place", "pass the right input"),
    Cause("other-position", "another position is taken", "take torch's position"),
    Cause("other-slice", "another slice is taken", "take torch's slice"),
    Cause("other-value", "another value is used in its place", "use the value that torch uses"),
    # with a stride, "SAME" of JAX pads the end by more than the beginning, which torch does not do
    Cause("padding", "other padding, or at the other end", "pad as torch does"),
    Cause(
        "padding-gradient", "a gradient of the padding row", "stop the gradient of the padding row"
    ),
    Cause("padding-mode", "another kind of padding", "pad with the same mode"),
    Cause("padding-row", "the padding row taken as zeros, or not", "leave the row as torch does"),
    Cause(
        "parts-swapped",
        "parts of a tensor exchanged (gates, chunks)",
        "put the parts into torch's order",
    ),
    Cause(
        "permuted",
        "elements of an axis in another order (interleaved, heads and features)",
        "reshape in torch's order",
    ),
    Cause("pool-kind", "maximum or average", "use torch's pooling"),
    Cause("product-for-sum", "a product in place of a sum", "add"),
    Cause(
        "raises",
        "an exception where torch returns outputs",
        "take what torch takes, or say by `sizes` what the pair is made for",
    ),
    Cause("reduction", "another reduction (sum, mean, count)", "reduce as torch does"),
    Cause("renormalized", "divided by its sum", "do not divide"),
    Cause("resize-mode", "another kind of resizing", "resize as torch does"),
    Cause(
        "residual",
        "the residual taken from another value, before or after the norm",
        "add what torch adds",
    ),
    Cause("reversed", "elements in reverse order", "reverse them"),
    Cause(
        "rms-for-layer-norm",
        "RMS norm in place of layer norm: the mean is not subtracted",
        "subtract the mean",
    ),
    Cause("roll-direction", "rolled the other way", "roll the other way"),
    Cause("scale", "another scale factor", "multiply by torch's factor"),
    Cause("shape", "outputs of other shapes", "return outputs of torch's shapes"),
    Cause("shifted", "shifted by a position", "shift by torch's amount"),
    Cause("sign", "the sign flipped", "negate it"),
    Cause("softmax-axis", "softmax over another axis", "pass torch's axis"),
    Cause(
        "softmax-kind",
        "softmax, log-softmax or sigmoid in place of another",
        "use torch's function",
    ),
    Cause("stop-gradient", "a stop_gradient too many", "remove it"),
    Cause("straight-through", "the gradient of the identity", "use the gradient of the function"),
    Cause("stride", "another stride", "use torch's stride"),
    Cause("sum-for-product", "a sum in place of a product", "multiply"),
    Cause(
        "swapped-outputs",
        "outputs at each other's places, or under each other's names",
        "return each under its own name",
    ),
    Cause("swapped-parameters", "parameters exchanged", "load each under its own name"),
    Cause("term-order", "a difference in the other order", "exchange the two"),
    Cause(
        # `jax.lax.top_k` takes the first of equal elements; torch promises no order
        "ties",
        "equal elements in another order, or of which more are kept",
        "sort stably, and take elements by their positions as torch does, or by its threshold",
    ),
    Cause("top-k", "another number of the largest", "use torch's k"),
    Cause("transposed", "axes exchanged", "exchange the axes"),
    Cause(
        "unit-offset",
        "1 + x in place of x, or x in place of 1 + x",
        "load the weight with the offset, or drop it",
    ),
    Cause(
        "untied-weights",
        "tied in torch, and two leaves in the port, each with its own gradient",
        "use one leaf in both places",
    ),
    Cause("unused-parameter", "a torch parameter that the JAX model does not use", "use it"),
    Cause(
        # `torch.var` divides by n - 1 by default, `jnp.var` by n; so do the running variances of
        # torch's and flax's batch norm
        "variance-correction",
        "biased or unbiased variance (correction, ddof)",
        "pass ddof as torch does",
    ),
    # 1e-2 by default in torch's AdamW, and 1e-4 in `optax.adamw`
    Cause("weight-decay", "another weight decay", "pass torch's weight decay"),
    Cause("weight-permuted", "elements of a weight in another order", "reorder the weight in load"),
    Cause(
        # a linear layer's weight is (out, in) in torch, and (in, out) in flax
        "weight-transposed",
        "a weight that is not transposed, or once too often",
        "transpose it in load",
    ),
    Cause("zeros", "zeros in its place", "use the value that torch uses"),
    Cause(
        "low-precision", "computed in a lower precision", "compute in torch's dtype, or leave it"
    ),
    Cause("unknown", "a cause that was not found", "compare the two lines"),
)

CAUSES: dict[str, Cause] = {row.name: row for row in _ROWS}
UNKNOWN = "unknown"
"""The name of a cause that was not found."""


def causes_of(name: str) -> list[str]:
    """Return the causes of a name of the form `a and b`."""
    return name.split(" and ")


def is_cause(name: str) -> bool:
    """Return whether a name is that of a cause, or of several."""
    return all(part in CAUSES for part in causes_of(name))


def meaning(name: str) -> str:
    """Return what a name stands for, or nothing where it says so itself."""
    return " and ".join(row.meaning for row in _known_causes(name))


def remedy(name: str) -> str:
    """Return what to do about a cause, or nothing."""
    return "; ".join(row.remedy for row in _known_causes(name))


def _known_causes(name: str) -> list[Cause]:
    return [CAUSES[part] for part in causes_of(name) if part in CAUSES and part != UNKNOWN]
