//! Numbers of parameters and of bytes, as people write them and read them.

/// `7.5e9`, `7.5B`, `350M`, `124439808`.
pub(super) fn parse_count(text: &str) -> Result<u64, String> {
    let hint = || format!("{text:?} is no number of parameters; write 7.5e9, 7.5B or 350M");
    let units = [("K", 1e3), ("M", 1e6), ("B", 1e9), ("T", 1e12)];
    let found = units.iter().find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, *factor)));
    let (digits, factor) = found.unwrap_or((text, 1.0));
    let count = digits.trim().parse::<f64>().map_err(|_| hint())? * factor;
    // Above 10^18 parameters bytes would not fit 64 bits.
    if !(1.0..=1e18).contains(&count) {
        return Err(format!("{text:?}: expected 1 to 1e18 parameters"));
    }
    Ok(count.round() as u64)
}

/// `24GiB`, `80GB`, `512MiB`, a number of bytes.
pub(super) fn parse_bytes(text: &str) -> Result<u64, String> {
    let hint = || format!("{text:?} is no size; write 24GiB, 80GB or a number of bytes");
    let units = [
        ("KiB", 1u64 << 10),
        ("MiB", 1 << 20),
        ("GiB", 1 << 30),
        ("TiB", 1 << 40),
        ("KB", 1_000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
        ("TB", 1_000_000_000_000),
    ];
    let found = units.iter().find_map(|(unit, bytes)| Some((text.strip_suffix(unit)?, *bytes)));
    let (digits, unit) = found.unwrap_or((text, 1));
    if let Ok(whole) = digits.trim().parse::<u64>() {
        return whole.checked_mul(unit).ok_or_else(hint);
    }
    let number: f64 = digits.trim().parse().map_err(|_| hint())?;
    let bytes = number * unit as f64;
    if bytes.is_finite() && (0.0..1e18).contains(&bytes) { Ok(bytes.round() as u64) } else { Err(hint()) }
}

/// Three digits and a decimal unit: `31.4 GB`, as the ZeRO paper has it.
pub(super) fn show_bytes(bytes: u64) -> String {
    let units = ["B", "kB", "MB", "GB", "TB", "PB", "EB"];
    let (digits, unit) = three_digits(bytes, &units);
    format!("{digits} {unit}")
}

/// Three digits and a letter: `7.50B`.
pub(super) fn show_count(count: u64) -> String {
    let (digits, unit) = three_digits(count, &["", "K", "M", "B", "T", "e15", "e18"]);
    format!("{digits}{unit}")
}

fn three_digits<'a>(number: u64, units: &[&'a str]) -> (String, &'a str) {
    let mut at = 0;
    let mut scale = 1u64;
    // 999.5 and more is shown as 1.00 of the next unit.
    while at + 1 < units.len() && u128::from(number) * 2 >= u128::from(scale) * 1999 {
        scale = scale.saturating_mul(1000);
        at += 1;
    }
    let value = number as f64 / scale as f64;
    let decimals = match value {
        _ if at == 0 => 0,
        v if v < 9.995 => 2,
        v if v < 99.95 => 1,
        _ => 0,
    };
    (format!("{value:.decimals$}"), units[at])
}

/// `1557611200` as `1,557,611,200`.
pub(super) fn with_commas(number: u64) -> String {
    let digits = number.to_string();
    let mut shown = String::with_capacity(digits.len() * 4 / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            shown.push(',');
        }
        shown.push(digit);
    }
    shown
}
