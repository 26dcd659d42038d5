use super::{INTEGERS, check, floats, triples};

fn f(x: u64) -> f32 {
    f32::from_bits(x as u32)
}

/// The bits of a result, with the canonical NaN of GPUs.
fn bits(x: f32) -> u64 {
    if x.is_nan() {
        0x7fff_ffff
    } else {
        u64::from(x.to_bits())
    }
}

#[test]
fn integers_add_multiply_and_divide() {
    let all = triples(&INTEGERS);
    check("add.s32 %r, %x, %y;", &all, |[a, b, _]| {
        u64::from((a as u32).wrapping_add(b as u32))
    });
    check("sub.s64 %d, %a, %b;", &all, |[a, b, _]| a.wrapping_sub(b));
    check("sub.s16 %h, %i, %j;", &all, |[a, b, _]| {
        u64::from((a as u16).wrapping_sub(b as u16))
    });
    check("add.sat.s32 %r, %x, %y;", &all, |[a, b, _]| {
        u64::from((a as i32).saturating_add(b as i32) as u32)
    });
    check("mul.lo.s32 %r, %x, %y;", &all, |[a, b, _]| {
        u64::from((a as u32).wrapping_mul(b as u32))
    });
    check("mul.hi.u64 %d, %a, %b;", &all, |[a, b, _]| {
        ((u128::from(a) * u128::from(b)) >> 64) as u64
    });
    check("mul.hi.s64 %d, %a, %b;", &all, |[a, b, _]| {
        ((i128::from(a as i64) * i128::from(b as i64)) >> 64) as u64
    });
    check("mul.hi.s32 %r, %x, %y;", &all, |[a, b, _]| {
        u64::from(((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32)
    });
    check("mul.wide.s32 %d, %x, %y;", &all, |[a, b, _]| {
        (i64::from(a as i32) * i64::from(b as i32)) as u64
    });
    check("mul.wide.u16 %r, %i, %j;", &all, |[a, b, _]| {
        u64::from(u32::from(a as u16) * u32::from(b as u16))
    });
    check("mad.wide.u32 %d, %x, %y, %c;", &all, |[a, b, c]| {
        (u64::from(a as u32) * u64::from(b as u32)).wrapping_add(c)
    });
    check("mad.lo.s64 %d, %a, %b, %c;", &all, |[a, b, c]| {
        a.wrapping_mul(b).wrapping_add(c)
    });
    check("mad.hi.u32 %r, %x, %y, %z;", &all, |[a, b, c]| {
        u64::from((((a as u32 as u64 * b as u32 as u64) >> 32) as u32).wrapping_add(c as u32))
    });
    let divisible: Vec<_> = all
        .iter()
        .copied()
        .filter(|[_, b, _]| *b as u16 != 0)
        .collect();
    check("div.s32 %r, %x, %y;", &divisible, |[a, b, _]| {
        u64::from((a as i32).wrapping_div(b as i32) as u32)
    });
    check("rem.s32 %r, %x, %y;", &divisible, |[a, b, _]| {
        u64::from((a as i32).wrapping_rem(b as i32) as u32)
    });
    check("div.u64 %d, %a, %b;", &divisible, |[a, b, _]| a / b);
    check("rem.u16 %h, %i, %j;", &divisible, |[a, b, _]| {
        u64::from(a as u16 % b as u16)
    });
    check("abs.s32 %r, %x;", &all, |[a, ..]| {
        u64::from((a as i32).unsigned_abs())
    });
    check("neg.s64 %d, %a;", &all, |[a, ..]| a.wrapping_neg());
    check("min.s32 %r, %x, %y;", &all, |[a, b, _]| {
        u64::from((a as i32).min(b as i32) as u32)
    });
    check("max.u64 %d, %a, %b;", &all, |[a, b, _]| a.max(b));
    check("sad.s32 %r, %x, %y, %z;", &all, |[a, b, c]| {
        u64::from((c as u32).wrapping_add((a as i32).abs_diff(b as i32)))
    });
}

#[test]
fn sums_carry_over_registers() {
    let all = triples(&INTEGERS);
    // The upper half of a 128-bit sum and difference, in 32-bit steps.
    let code = "mov.b64 {%t0, %t1}, %a; mov.b64 {%t2, %t3}, %b; add.cc.u32 %t4, %t0, %t2; addc.cc.u32 %t5, %t1, %t3;
                addc.u32 %r, 0, 0;";
    check(code, &all, |[a, b, _]| {
        u64::from(a.checked_add(b).is_none())
    });
    let code = "mov.b64 {%t0, %t1}, %a; mov.b64 {%t2, %t3}, %b; sub.cc.u32 %t4, %t0, %t2; subc.u32 %t5, %t1, %t3;
                mov.b64 %d, {%t4, %t5};";
    check(code, &all, |[a, b, _]| a.wrapping_sub(b));
    check(
        "add.cc.s64 %u0, %a, %b; addc.s64 %d, %c, 0;",
        &all,
        |[a, b, c]| c.wrapping_add(u64::from(a.checked_add(b).is_none())),
    );
}

#[test]
fn bits_are_shifted_picked_and_counted() {
    let all = triples(&INTEGERS);
    check("and.b64 %d, %a, %b;", &all, |[a, b, _]| a & b);
    check("xor.b32 %r, %x, %y;", &all, |[a, b, _]| {
        u64::from(a as u32 ^ b as u32)
    });
    check("not.b16 %h, %i;", &all, |[a, ..]| u64::from(!(a as u16)));
    check("shl.b32 %r, %x, %y;", &all, |[a, b, _]| {
        u64::from((a as u32).checked_shl(b as u32).unwrap_or(0))
    });
    check("shr.u64 %d, %a, %y;", &all, |[a, b, _]| {
        a.checked_shr(b as u32).unwrap_or(0)
    });
    check("shr.s32 %r, %x, %y;", &all, |[a, b, _]| {
        u64::from((a as i32 >> (b as u32).min(31)) as u32)
    });
    check("shf.l.wrap.b32 %r, %x, %y, %z;", &all, |[a, b, c]| {
        let both = u64::from(b as u32) << 32 | u64::from(a as u32);
        (both << (c & 31)) >> 32
    });
    check("shf.r.clamp.b32 %r, %x, %y, %z;", &all, |[a, b, c]| {
        let both = u64::from(b as u32) << 32 | u64::from(a as u32);
        u64::from((both >> (c as u32).min(32)) as u32)
    });
    check("popc.b64 %r, %a;", &all, |[a, ..]| {
        u64::from(a.count_ones())
    });
    check("clz.b32 %r, %x;", &all, |[a, ..]| {
        u64::from((a as u32).leading_zeros())
    });
    check("brev.b32 %r, %x;", &all, |[a, ..]| {
        u64::from((a as u32).reverse_bits())
    });
    check("bfind.u32 %r, %x;", &all, |[a, ..]| {
        u64::from(31u32.wrapping_sub((a as u32).leading_zeros()))
    });
    check("bfind.s64 %r, %a;", &all, |[a, ..]| {
        let a = if (a as i64) < 0 { !a } else { a };
        u64::from(63u32.wrapping_sub(a.leading_zeros()))
    });
    check("prmt.b32 %r, %x, %y, 0x5410;", &all, |[a, b, _]| {
        (a & 0xffff) | (b & 0xffff) << 16
    });

    check("prmt.b32 %r, %x, %y, 0x9b26;", &all, |[a, b, _]| {
        let bytes = [(a as u32).to_le_bytes(), (b as u32).to_le_bytes()].concat();
        let sign = |byte: u8| if byte >> 7 == 1 { 0xff } else { 0 };
        u64::from(u32::from_le_bytes([
            bytes[6],
            bytes[2],
            sign(bytes[3]),
            sign(bytes[1]),
        ]))
    });

    check("lop3.b32 %r, %x, %y, %z, 0xe8;", &all, |[a, b, c]| {
        u64::from((a & b | a & c | b & c) as u32)
    });
    check("lop3.b32 %r, %x, %y, %z, 0x1d;", &all, |[a, b, c]| {
        mask_1d(a, b, c)
    });

    for (at, len) in [(0u32, 8u32), (4, 12), (24, 16), (31, 1), (32, 4), (5, 0)] {
        check(&format!("bfe.u32 %r, %x, {at}, {len};"), &all, |[a, ..]| {
            u64::from(a as u32) >> at.min(63) & ((1 << len) - 1)
        });
        check(
            &format!("bfi.b32 %r, %x, %y, {at}, {len};"),
            &all,
            |[a, b, _]| {
                let field = ((1u64 << len) - 1) << at & 0xffff_ffff;
                (b & 0xffff_ffff & !field) | (u64::from(a as u32) << at & field)
            },
        );
    }

    check("bfe.s32 %r, %x, 4, 12;", &all, |[a, ..]| {
        u64::from(((a as u32) << 16) as i32 as u32 >> 20) | sign_from(a)
    });
}

/// The sign of bit 15 over bits 12 and up.
fn sign_from(a: u64) -> u64 {
    if a >> 15 & 1 == 1 { 0xffff_f000 } else { 0 }
}

/// The truth table 0x1d, row by row.
fn mask_1d(a: u64, b: u64, c: u64) -> u64 {
    (0..32).fold(0, |all, i| {
        let row = (a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1);
        all | (0x1d >> row & 1) << i
    })
}

#[test]
fn single_precision_is_ieee_with_one_nan() {
    let all = triples(&floats());
    check("add.rn.f32 %r, %x, %y;", &all, |[a, b, _]| {
        bits(f(a) + f(b))
    });
    check("sub.f32 %r, %x, %y;", &all, |[a, b, _]| bits(f(a) - f(b)));
    check("mul.rn.f32 %r, %x, %y;", &all, |[a, b, _]| {
        bits(f(a) * f(b))
    });
    check("div.rn.f32 %r, %x, %y;", &all, |[a, b, _]| {
        bits(f(a) / f(b))
    });
    check("fma.rn.f32 %r, %x, %y, %z;", &all, |[a, b, c]| {
        bits(f(a).mul_add(f(b), f(c)))
    });
    check("sqrt.rn.f32 %r, %x;", &all, |[a, ..]| bits(f(a).sqrt()));
    check("rcp.rn.f32 %r, %x;", &all, |[a, ..]| bits(1.0 / f(a)));
    check("neg.f32 %r, %x;", &all, |[a, ..]| a ^ 0x8000_0000);
    check("abs.f32 %r, %x;", &all, |[a, ..]| a & 0x7fff_ffff);

    let flush = |a: u64| {
        if f(a).is_subnormal() {
            a & 0x8000_0000
        } else {
            a
        }
    };

    check("add.ftz.f32 %r, %x, %y;", &all, |[a, b, _]| {
        flush(bits(f(flush(a)) + f(flush(b))))
    });
    check("mul.sat.f32 %r, %x, %y;", &all, |[a, b, _]| {
        let x = f(a) * f(b);
        bits(if x.is_nan() {
            0.0
        } else {
            x.clamp(0.0, 1.0) + 0.0
        })
    });

    // 2^x as exp() uses it, and one rounding of the exact value.
    check("ex2.approx.ftz.f32 %r, %x;", &all, |[a, ..]| {
        flush(bits(f64::from(f(flush(a))).exp2() as f32))
    });
    check("rsqrt.approx.f32 %r, %x;", &all, |[a, ..]| {
        bits((1.0 / f64::from(f(a)).sqrt()) as f32)
    });
}

#[test]
fn sums_round_in_the_direction_asked_for() {
    let all = triples(&floats());
    // Without overflow, the neighbours of the rounded sum are the bounds.
    let finite = |x: f64| x.is_finite() && x.abs() < 3e38;
    let some: Vec<_> = all
        .into_iter()
        .filter(|&[a, b, _]| finite(f64::from(f(a)) + f64::from(f(b))))
        .collect();

    for (name, down) in [("rm", true), ("rp", false)] {
        for (got, &[a, b, _]) in super::evaluate(&format!("add.{name}.f32 %r, %x, %y;"), &some)
            .iter()
            .zip(&some)
        {
            let exact = f64::from(f(a)) + f64::from(f(b));
            let got = f(*got);
            let next = f64::from(if down { got.next_up() } else { got.next_down() });
            let got = f64::from(got);
            let right = if down {
                got <= exact && exact <= next
            } else {
                got >= exact && exact >= next
            };
            assert!(right, "{name} {:e} + {:e} = {got:e}, {exact:e}", f(a), f(b));
        }
    }

    // CUDA's expf() computes an integer part this way.
    let code = "fma.rm.f32 %r, %x, %y, %z;";
    let log2e = std::f32::consts::LOG2_E;
    let magic = 12_583_039.0f32;
    let inputs: Vec<[u64; 3]> = (-400..400)
        .map(|i| {
            [
                u64::from((i as f32 * 0.217).to_bits()),
                u64::from(log2e.to_bits()),
                u64::from(magic.to_bits()),
            ]
        })
        .collect();

    check(code, &inputs, |[a, b, c]| {
        bits(((f64::from(f(a)) * f64::from(f(b))).floor() + f64::from(f(c))) as f32)
    });
}

#[test]
fn min_and_max_handle_nan_and_signed_zero() {
    let all = triples(&floats());
    let larger = |a: f32, b: f32| match (a.is_nan(), b.is_nan()) {
        (true, _) => b,
        (_, true) => a,
        _ if a == b => {
            if a.is_sign_positive() {
                a
            } else {
                b
            }
        }
        _ => {
            if a > b {
                a
            } else {
                b
            }
        }
    };

    check("max.f32 %r, %x, %y;", &all, |[a, b, _]| {
        bits(larger(f(a), f(b)))
    });
    check("min.f32 %r, %x, %y;", &all, |[a, b, _]| {
        bits(-larger(-f(a), -f(b)))
    });

    check("max.NaN.f32 %r, %x, %y;", &all, |[a, b, _]| {
        bits(if f(a).is_nan() || f(b).is_nan() {
            f32::NAN
        } else {
            larger(f(a), f(b))
        })
    });

    check("max.f32 %r, %x, %y, %z;", &all, |[a, b, c]| {
        bits(larger(larger(f(a), f(b)), f(c)))
    });
}

#[test]
fn double_precision_is_the_processors() {
    let values: Vec<u64> = floats()
        .iter()
        .map(|&a| (f64::from(f(a)) * 1.000_000_001).to_bits())
        .collect();
    let all: Vec<_> = triples(&values)
        .into_iter()
        .filter(|t| t.iter().all(|&a| !f64::from_bits(a).is_nan()))
        .collect();
    let d = f64::from_bits;
    let same = |x: f64| if x.is_nan() { 0 } else { x.to_bits() };

    for (code, expected) in [
        ("add.rn.f64", (|a, b, _| a + b) as fn(f64, f64, f64) -> f64),
        ("mul.rn.f64", |a, b, _| a * b),
        ("div.rn.f64", |a, b, _| a / b),
        ("max.f64", |a, b, _| a.max(b)),
    ] {
        let code =
            format!("{code} %u0, %a, %b; setp.nan.f64 %p0, %u0, %u0; selp.b64 %d, 0, %u0, %p0;");
        check(&code, &all, |[a, b, c]| same(expected(d(a), d(b), d(c))));
    }

    let code = "fma.rn.f64 %u0, %a, %b, %c; setp.nan.f64 %p0, %u0, %u0; selp.b64 %d, 0, %u0, %p0;";
    check(code, &all, |[a, b, c]| same(d(a).mul_add(d(b), d(c))));
}

#[test]
fn halves_round_every_result_once() {
    use crate::ops::format::{BF16, F16, Rounding};
    let values: Vec<u64> = [
        0x0000, 0x3c00, 0xbc00, 0x3c01, 0x0001, 0x83ff, 0x7bff, 0xfbff, 0x3555, 0x7c00, 0x4248,
        0x1234, 0x3f80, 0x7f7f,
    ]
    .iter()
    .map(|h| h | (h ^ 0x8001) << 16)
    .collect();

    let all = triples(&values);
    for (name, format) in [("f16", F16), ("bf16", BF16)] {
        let on = |a: u64, b: u64, c: u64, f: fn(f64, f64, f64) -> f64| {
            let half = |s: u32| {
                let of = |x: u64| format.widen(x >> s & 0xffff);
                format.narrow(f(of(a), of(b), of(c)), Rounding::Nearest) << s
            };
            half(0) | half(16)
        };
        check(&format!("mul.{name}x2 %r, %x, %y;"), &all, |[a, b, c]| {
            on(a, b, c, |a, b, _| a * b)
        });
        if name == "f16" {
            // 40 bits hold every sum of two f16.
            check("add.rn.f16x2 %r, %x, %y;", &all, |[a, b, c]| {
                on(a, b, c, |a, b, _| a + b)
            });
        }
        check(
            &format!("fma.rn.{name}x2 %r, %x, %y, 0;"),
            &all,
            |[a, b, _]| on(a, b, 0, |a, b, c| a * b + c),
        );
        check(&format!("neg.{name} %h, %i;"), &all, |[a, ..]| {
            (a ^ 0x8000) & 0xffff
        });
    }
}
