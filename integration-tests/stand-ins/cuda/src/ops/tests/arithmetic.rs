use super::{INTEGERS, bits, check, f, floats, triples};

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
    check("mul.lo.s32 %r, %x, %y;", &all, |[a, b, _]| {
        u64::from((a as u32).wrapping_mul(b as u32))
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
    check("max.relu.s32 %r, %x, %y;", &all, |[a, b, _]| {
        u64::from((a as i32).max(b as i32).max(0) as u32)
    });
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
    check("popc.b64 %r, %a;", &all, |[a, ..]| {
        u64::from(a.count_ones())
    });
    check("clz.b32 %r, %x;", &all, |[a, ..]| {
        u64::from((a as u32).leading_zeros())
    });
    check("brev.b32 %r, %x;", &all, |[a, ..]| {
        u64::from((a as u32).reverse_bits())
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

    for (at, len) in [(0u32, 8u32), (4, 12), (24, 16), (31, 1), (32, 4), (5, 0)] {
        check(
            &format!("bfi.b32 %r, %x, %y, {at}, {len};"),
            &all,
            |[a, b, _]| {
                let field = ((1u64 << len) - 1) << at & 0xffff_ffff;
                (b & 0xffff_ffff & !field) | (u64::from(a as u32) << at & field)
            },
        );
    }
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

    // 2^x as exp() uses it, and one rounding of the exact value.
    check("ex2.approx.ftz.f32 %r, %x;", &all, |[a, ..]| {
        flush(bits(f64::from(f(flush(a))).exp2() as f32))
    });
    check("rsqrt.approx.f32 %r, %x;", &all, |[a, ..]| {
        bits((1.0 / f64::from(f(a)).sqrt()) as f32)
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
