use super::*;

const HEADER: &str = "source,gpu,nodes,gpus,model,params,layers,width,heads,kv_heads,ffn,vocab,seq,\
                      micro_batch,global_batch,stage,act_ckpt,dtype,intra_bw,inter_bw,tok_s_gpu,mfu";
const ROW: &str = "x,h100_80gb,2,16,llama-1b,1000000000,16,2048,16,4,8192,50368,2048,4,200,3,full,\
                   amp_fp8,450,50,1234.5,\"40,5\"";

fn parse(row: &str) -> Result<Table, RowsError> {
    Table::parse(&format!("{HEADER}\n{row}\n"), "my.csv")
}

fn message(from: &str, to: &str) -> String {
    let error = parse(&ROW.replacen(from, to, 1)).unwrap_err();
    error.to_string()
}

#[test]
fn fields_have_types() {
    let table = parse(ROW).unwrap();
    let row = &table.rows[0];
    assert_eq!((row.line, row.nodes, row.gpus, row.stage), (2, 2, 16, 3));
    assert_eq!((row.shape.kv_heads, row.shape.gated), (4, true));
    assert_eq!(row.measured, Some(1234.5));
    assert_eq!(row.micro_batches(), 3);
    assert_eq!(row.tokens_per_s(2.0), 200.0 * 2048.0 / 16.0 / 2.0);
    let software = Software {
        attention: Attention::Flash,
        wide_reduce: true,
        fp8: true,
        recompute: true,
    };
    assert_eq!(row.software(), software);
    assert_eq!(
        row.machine().unwrap(),
        Machine {
            ..Machine::h100_80g()
        }
    );
}

#[test]
fn published_rows_are_read() {
    let text = include_str!("../../tests/data/steps.csv");
    let table = Table::parse(text, "steps.csv").unwrap();
    assert_eq!(table.rows.len(), 456);
    assert_eq!(table.rows[455].line, 457);
    let expected: Vec<String> = text.lines().map(|line| format!("{line},")).collect();
    let written = table.to_csv(&[]);
    let body = written.lines().skip(1);
    assert!(body.eq(expected[1..].iter().map(String::as_str)));
}

#[test]
fn columns_may_be_in_any_order() {
    let reversed = |line: &str| {
        let fields = split(line, "", 1).unwrap();
        let reversed: Vec<String> = fields.into_iter().rev().collect();
        reversed.join(",")
    };
    let text = format!("\u{feff}{}\r\n\r\n{}\r\n", reversed(HEADER), reversed(ROW));
    let table = Table::parse(&text, "my.csv").unwrap();
    let mut expected = parse(ROW).unwrap().rows;
    expected[0].line = 3;
    assert_eq!(table.rows, expected);
}

#[test]
fn predictions_are_appended_once() {
    let table = parse(ROW).unwrap();
    let expected = format!("{HEADER},{PREDICTED}\n{ROW},1200.00\n");
    let written = table.to_csv(&[1200.0]);
    assert_eq!(written, expected);
    let again = Table::parse(&written, "my.csv").unwrap();
    assert_eq!(again.to_csv(&[1200.0]), expected);
}

#[test]
fn errors_name_the_place() {
    assert_eq!(
        message(",16,llama", ",many,llama"),
        "my.csv, line 2, column gpus: \"many\" is not a whole number above 0"
    );
    assert!(message(",3,full", ",4,full").contains("column stage: \"4\" is not a ZeRO stage"));
    assert!(message("full", "half").contains("column act_ckpt"));
    assert!(message("450", "inf").contains("column intra_bw"));
    assert!(message(",50,", ",,").contains("column inter_bw"));
    assert!(message(",2,16", ",17,16").contains("column nodes"));
    assert!(message("450,", "").contains("line 2: 21 fields, but the header has 22"));
    assert!(message("40,5\"", "40,5").contains("line 2, column 22: a quote"));
}

#[test]
fn headers_are_checked() {
    let message = |text: &str| Table::parse(text, "my.csv").unwrap_err().to_string();
    assert!(message("").contains("no header"));
    let text = format!("{}\n{ROW}\n", HEADER.replace("heads,", "Heads,"));
    assert!(
        message(&text).contains("no column heads"),
        "{}",
        message(&text)
    );
    assert!(message("a,b,a\n").contains("two columns are named a"));
    assert!(message("a,b\n1,2\n").contains("no column model"));
}

#[test]
fn huge_counts_do_not_overflow() {
    let row = ROW.replace(",16,llama", ",18446744073709551615,llama");
    assert_eq!(parse(&row).unwrap().rows[0].micro_batches(), 1);
}
