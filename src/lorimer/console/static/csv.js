// Writes texts as cells of CSV files.

/** Quote a text for CSV. A spreadsheet would run text that starts like this as a formula. */
export function cell(text) {
  const plain = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(plain) ? `"${plain.replaceAll('"', '""')}"` : plain;
}
