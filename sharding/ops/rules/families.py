"""Load the rules of all operators: importing a family registers its rules."""

from . import metadata
from .elementwise import accumulate, like, pointwise
from .indexing import assign, index, masked, scatter
from .linalg import distance, fft, grouped, linalg, matmul
from .nn import attention, conv, cross_entropy, embedding, image, loss, norm, pool, rnn, softmax
from .optim import foreach, implementation
from .random import draw, dropout, init
from .reductions import calculus, count, extreme, reduction, scan, selection, statistics
from .shapes import concatenate, diagonal, reshape_uneven, shift, slicing, view

FAMILIES = (
    metadata,
    *(accumulate, like, pointwise),
    *(assign, index, masked, scatter),
    *(distance, fft, grouped, linalg, matmul),
    *(attention, conv, cross_entropy, embedding, image, loss, norm, pool, rnn, softmax),
    *(foreach, implementation),
    *(draw, dropout, init),
    *(calculus, count, extreme, reduction, scan, selection, statistics),
    *(concatenate, diagonal, reshape_uneven, shift, slicing, view),
)
