"""PTX that our Triton kernels contain, where Triton makes many more instructions of the same. Text alone,
so that tests can compute it without a GPU or Triton.
"""

# A word of four INT8 codes, as two int16, becomes two words of two bfloat16: its even and its odd codes. A
# code is (c & 127) - (c & 128), and bfloat16 0x4300 | x is 128 + x for x < 128, and 256 for x = 128: their
# difference is the code, exactly.
UNPACK_CODES = """{
.reg .b32 codes, small, sign, one;
mov.b32 one, 0x3F803F80;
lop3.b32 small, $2, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 sign, $2, 0x00800080, 0xC300C300, 0xEA;
fma.rn.bf16x2 $0, small, one, sign;
shr.b32 codes, $2, 8;
lop3.b32 small, codes, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 sign, codes, 0x00800080, 0xC300C300, 0xEA;
fma.rn.bf16x2 $1, small, one, sign;
}"""
