"""PTX of our kernels, computed here instruction by instruction."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cluster.model.cuda import ptx


def float_halves(words: np.ndarray) -> torch.Tensor:
    """[len(words), 2] bfloat16, the lower half first."""
    return torch.from_numpy(words.view(np.int32).copy()).view(torch.bfloat16).view(-1, 2)


def lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    """Each bit of the result is that of the table at 4 a + 2 b + c."""
    made = np.zeros_like(a)
    for place in range(8):
        if table >> place & 1:
            sides = [each if place >> shift & 1 else ~each for each, shift in ((a, 2), (b, 1), (c, 0))]
            made |= sides[0] & sides[1] & sides[2]
    return made


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    exact = float_halves(a).double() * float_halves(b).double() + float_halves(c).double()
    return exact.bfloat16().contiguous().view(torch.int32).numpy().view(np.uint32).ravel()


def computed(code: str, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The words $0 and $1 that the code makes of $2 = words [n] uint32."""
    values: dict[str, np.ndarray] = {"$2": words}

    def operand(name: str) -> np.ndarray:
        return np.full_like(words, int(name, 0)) if name[0].isdigit() else values[name]

    for line in code.strip("{}\n").splitlines():
        name, rest = line.strip(" ;").split(" ", 1)
        target, *sources = (part.strip() for part in rest.split(","))
        match name:
            case ".reg":
                continue
            case "mov.b32":
                values[target] = operand(sources[0])
            case "shr.b32":
                values[target] = operand(sources[0]) >> operand(sources[1])
            case "lop3.b32":
                a, b, c = map(operand, sources[:3])
                values[target] = lop3(a, b, c, int(sources[3], 0))
            case "fma.rn.bf16x2":
                a, b, c = map(operand, sources)
                values[target] = fma(a, b, c)
            case _:
                raise AssertionError(f"not known here: {line}")
    return values["$0"], values["$1"]


@pytest.mark.parametrize("other", [0x0000, 0x7F80, 0x80FF, 0xFFFF])
def test_every_pair_of_codes_becomes_its_two_numbers(other: int) -> None:
    """In both halves of a word, beside another pair."""
    pairs = np.arange(1 << 16, dtype=np.uint32)
    for words in (pairs | np.uint32(other << 16), pairs << 16 | np.uint32(other)):
        codes = torch.from_numpy(words.view(np.int8).reshape(-1, 4).astype(np.float32))
        even, odd = (float_halves(made).float() for made in computed(ptx.UNPACK_CODES, words))
        assert torch.equal(even, codes[:, 0::2])
        assert torch.equal(odd, codes[:, 1::2])
