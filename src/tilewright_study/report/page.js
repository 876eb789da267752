"use strict";
// Tables: a header sorts its column, a second time the other way round; the search hides the rows without its words.
for (const table of document.querySelectorAll("table[id^=rows-]")) {
  const body = table.tBodies[0];
  const headers = [...table.tHead.rows[0].cells];
  headers.forEach((header, column) => header.addEventListener("click", () => {
    const down = header.getAttribute("aria-sort") === "ascending";
    const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const numeric = header.classList.contains("number");
    const compare = (a, b) => {
      const [x, y] = [key(a), key(b)];
      // What was not measured stays last either way.
      if (x === "" || y === "") return (x === "") - (y === "");
      return (down ? -1 : 1) * (numeric ? x - y : x.localeCompare(y, undefined, { numeric: true }));
    };
    body.append(...[...body.rows].sort(compare));
    headers.forEach((other) => other.setAttribute("aria-sort", "none"));
    header.setAttribute("aria-sort", down ? "descending" : "ascending");
  }));
}
for (const input of document.querySelectorAll("input[data-table]")) {
  const rows = [...document.getElementById(`rows-${input.dataset.table}`).tBodies[0].rows];
  const found = document.getElementById(`found-${input.dataset.table}`);
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/);
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    const shown = rows.filter((row) => !row.hidden).length;
    found.textContent = shown === rows.length ? `${shown} rows` : `${shown} of ${rows.length} rows`;
  });
}
