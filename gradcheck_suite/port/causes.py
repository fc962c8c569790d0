"""The names of causes: what each means and what to do. The one table of them; imports neither framework."""

from __future__ import annotations

from typing import NamedTuple


class Cause(NamedTuple):
    """What a name stands for.

    Attributes:
        meaning: as a clause that completes "the cause is that ..." or names the thing.
        remedy: what to change in the port.
    """

    meaning: str
    remedy: str


_ROWS = """
activation | another activation function | use torch's activation
align-corners | corners aligned or half-pixel centers in resizing | compute the positions as align_corners of torch says
amsgrad | the maximum of second moments (amsgrad) | use optax.amsgrad or optax.adam as torch does
average-window | padding or border counted differently in an average | divide by the count that torch divides by
axis | a sum or mean over another axis | reduce over torch's axis
batch-statistics | batch or running statistics | use those that torch uses in this mode
betas | other decay rates of the moments | pass torch's betas as b1 and b2
bias-correction | moments with or without bias correction | correct both moments as torch does
blocks-swapped | blocks of an axis, such as gates or heads, in another order | reorder the blocks in load
centered | the mean gradient subtracted (centered RMSprop) | use optax.rmsprop(centered=...) as torch does
class-weights | class weights in the loss | pass the class weights to the loss
clip-epsilon | clipping without torch's 1e-6 beside the norm | scale by limit / (norm + 1e-6), or accept it
clip-order | clipping at another place in the chain | clip the gradients before the optimizer reads them
clipping | clipping that the other side has not, or of another kind | clip as the torch loop does
comparison | a comparison that includes or excludes equality | compare as torch does
constant | another constant | use torch's constant
count | a mean over another count | divide by torch's count
cumulative-sum | a cumulative sum with or without the element itself, or from the other end | accumulate as torch does
custom-gradient | a rule for the gradient of its own (custom_vjp, custom_jvp) that is wrong | correct the backward rule
decay-mask | weight decay on other parameters | mask the decay as torch's parameter groups do
decay-of-squares | another decay rate of the squares | pass torch's alpha as decay
decoupled-decay | weight decay coupled with the gradient, or decoupled | decay as torch does: adamw, or added decay
decay-place | weight decay at another place of the update | apply the decay where torch does
dampening | another dampening of the momentum | scale the gradient by 1 - dampening
dilation | another dilation of the kernel | pass rhs_dilation as torch does
dropout-active | dropout that is active in evaluation | pass deterministic=True
embedding-scale | embeddings scaled by the width or its root | scale the embeddings as torch does
eps | another epsilon | pass torch's eps
eps-place | epsilon added outside of the root, or inside | add eps where torch does
eps-inside-root | epsilon of the optimizer inside of the root, or outside | set eps_in_sqrt or eps_root as torch does
eps-before-correction | epsilon of the optimizer added before the bias correction | add eps after it
extra-activation | an activation that torch does not have | remove it
extra-softmax | a softmax that torch does not have | remove it
extra-norm | a normalization that torch does not have | remove it
gelu-approximation | the tanh or erf form of gelu | pass approximate=False or True as torch does
gradient-scaled | a gradient with another factor | remove the factor
group-order | channels grouped in another order | group neighbouring channels
groups | another number of groups | use torch's number of groups
gru-bias | the recurrent bias of the new gate outside of the reset gate | add it inside
gru-reset-gate | the reset gate before the recurrent product, or after | apply it as torch does
halves-swapped | the two halves of an axis exchanged | exchange them
ignore-index | ignored targets (padding, ignore_index) counted otherwise | divide by the targets that count
index-offset | an index or position with an offset | start where torch starts
index-reversed | positions from the other end | count from torch's end
initial-accumulator | another start of the accumulator | set initial_accumulator_value
kernel-flipped | the kernel flipped: convolution in place of correlation | flip the kernel in load
kernel-transposed | axes of the kernel exchanged | transpose the kernel in load
label-smoothing | another label smoothing | smooth over all classes, as torch does
layer-for-rms-norm | layer norm in place of RMS norm: the mean is subtracted | do not subtract the mean
learning-rate | another learning rate or schedule | pass torch's learning rate
load | a leaf of the parameters that is not loaded as torch has it | load it from torch's state
loss-kind | another loss | use torch's loss
loss-threshold | another threshold of the loss (beta, delta) | pass torch's threshold
mask-diagonal | the mask shifted by a position | shift the diagonal
mask-polarity | the mask inverted: what is to be seen is masked | invert the mask
mask-transposed | the mask transposed | transpose it
mask-value | another value at masked positions | use -inf, or the value that torch uses
mask-window | a window of the mask that is one position wider or narrower | compare as torch does
merged-biases | two biases that torch trains are one: its step is that of one | keep both, or double its step
missing-activation | an activation is missing | apply it
missing-bias | a bias is missing | add the bias
missing-clipping | no clipping | chain optax.clip_by_global_norm before the optimizer
missing-mask | no mask | apply the mask before the softmax
missing-norm | a normalization is missing or stands elsewhere | normalize where torch does
missing-operation | an operation of torch is missing | add it
missing-root | division by the variance in place of its root | divide by the root
missing-scale | a factor is missing | multiply by it
missing-softmax | no softmax | apply softmax
missing-stop-gradient | no stop_gradient where torch detaches: an extra gradient | apply jax.lax.stop_gradient
missing-term | a term such as a residual (skip connection) is missing | add it
missing-transpose | axes not exchanged before a reshape | transpose before the reshape
momentum | another momentum | pass torch's momentum
momentum-convention | old and new value exchanged, or momentum as an average | use 1 - momentum of torch
missing-weight-decay | no weight decay | add the weight decay
nesterov | Nesterov momentum on one side alone | pass nesterov as torch does
no-gradient | no gradient at all where torch has one | look for stop_gradient, a cast or a closed-over parameter
norm-axis | normalization over another axis | normalize over torch's axes
norm-order | norm before the sublayer or after it (pre-norm, post-norm) | normalize where torch does
not-loaded | a parameter that is not loaded: the leaf stays at its initial value | load it from torch's state
not-updated | running statistics that are not updated | return the updated statistics
one-minus | 1 - x in place of x | exchange the two weights
operands-swapped | the operands in the other order | exchange them
optimizer-eps | another epsilon of the optimizer | pass torch's eps
optimizer-kind | another optimizer | use torch's optimizer
order | two operations in the other order | exchange them
order-of-elements | elements in another order | reorder them
order-of-parts | parts joined in the other order | join them in torch's order
other-input | another input in its place | pass the right input
other-position | another position is taken | take torch's position
other-slice | another slice is taken | take torch's slice
other-value | another value is used in its place | use the value that torch uses
padding | other padding, or at the other end | pad as torch does
padding-gradient | a gradient of the padding row | stop the gradient of the padding row
padding-mode | another kind of padding | pad with the same mode
padding-row | the padding row taken as zeros, or not | leave the row as torch does
parts-swapped | parts of a tensor exchanged (gates, chunks) | exchange them
permuted | elements of an axis in another order (interleaved, heads and features) | reshape in torch's order
pool-kind | maximum or average | use torch's pooling
product-for-sum | a product in place of a sum | add
reduction | another reduction (sum, mean, count) | reduce as torch does
renormalized | divided by its sum | do not divide
resize-mode | another kind of resizing | resize as torch does
residual | the residual taken from another value, before or after the norm | add what torch adds
reversed | elements in reverse order | reverse them
rms-for-layer-norm | RMS norm in place of layer norm: the mean is not subtracted | subtract the mean
roll-direction | rolled the other way | roll the other way
scale | another scale factor | multiply by torch's factor
shape | outputs of other shapes | return outputs of torch's shapes
shifted | shifted by a position | shift by torch's amount
sign | the other sign | exchange the sign
softmax-axis | softmax over another axis | pass torch's axis
softmax-kind | softmax, log-softmax or sigmoid in place of another | use torch's function
softmax-plus-one | softmax with one more in the sum | use the ordinary softmax
stop-gradient | a stop_gradient too many | remove it
straight-through | the gradient of the identity | use the gradient of the function
stride | another stride | use torch's stride
sum-for-product | a sum in place of a product | multiply
swapped-parameters | parameters exchanged | exchange them in load
term-order | a difference in the other order | exchange the two
top-k | another number of the largest | use torch's k
transposed | axes exchanged | exchange the axes
unit-offset | 1 + x in place of x, or x in place of 1 + x | load the weight with the offset, or drop it
untied-weights | tied in torch, and two leaves in the port, each with its own gradient | use one leaf in both places
unused-parameter | a parameter of torch that the port has not | use it
variance-correction | biased or unbiased variance (correction, ddof) | pass ddof as torch does
weight-decay | another weight decay | pass torch's weight decay
weight-permuted | elements of a weight in another order | reorder the weight in load
weight-transposed | a weight that is not transposed, or once too often | transpose it in load
zeros | zeros in its place | use the value that torch uses
low-precision | computed in a lower precision | compute in torch's dtype, or leave it
unknown | a cause that was not found | compare the two lines
"""
CAUSES: dict[str, Cause] = {
    name: Cause(meaning, remedy)
    for name, meaning, remedy in ([part.strip() for part in row.split("|")] for row in _ROWS.strip().splitlines())
}


def meaning(name: str) -> str:
    """Return what a name stands for, or nothing where it says so itself."""
    parts = [CAUSES[part].meaning for part in name.split(" and ") if part in CAUSES and part != "unknown"]
    return " and ".join(parts)


def remedy(name: str) -> str:
    """Return what to do about a cause, or nothing."""
    return "; ".join(CAUSES[p].remedy for p in name.split(" and ") if p in CAUSES and p not in ("unknown",))
