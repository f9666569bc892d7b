"""Sample calls of Fourier transforms."""

from tests.sharding.ops.rules.table import c, call, f, samples

samples(
    "fft.fft fft.ifft fft.hfft",
    call(c(4, 3)),
    call(c(4, 3), 5, 0),
    call(c(4, 3), norm="ortho", dim=0),
)
samples("fft.rfft fft.ihfft", call(f(4, 3)), call(f(4, 3), 5, 0))
samples("fft.irfft", call(c(4, 3), 4), call(c(4, 3), dim=0))
samples(
    "fft.fft2 fft.ifft2 fft.fftn fft.ifftn",
    call(c(2, 4, 3)),
    call(c(2, 4, 3), (4, 4)),
    call(c(2, 4, 3), dim=(0, 2)),
)
samples("fft.rfft2 fft.ihfft2 fft.rfftn fft.ihfftn", call(f(2, 4, 3)), call(f(2, 4, 3), dim=(0, 1)))
samples("fft.irfft2 fft.hfft2 fft.irfftn fft.hfftn", call(c(2, 4, 3)), call(c(2, 4, 3), (4, 3)))
samples("fft.fftshift fft.ifftshift", call(f(4, 3)), call(f(4, 3), 1))
