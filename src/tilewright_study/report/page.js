"use strict";
/** The text of gzip in base64, as the page keeps what it shows on demand. */
function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

/** Show what belongs to an opened `details`, but for what belongs to others in it that are closed. */
async function fill(details) {
  for (const place of details.querySelectorAll("[data-packed]")) {
    if (place.closest("details") !== details) continue;
    const packed = place.dataset.packed;
    delete place.dataset.packed;
    const text = await unpack(packed);
    if (place.tagName === "IMG") place.src = text;
    else {
      place.innerHTML = text;
      arrange(place);
    }
  }
}

/** A header of a table sorts its column, a second time the other way round; the search hides the rows without its words. */
function arrange(place) {
  const table = place.querySelector("table");
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
  const input = place.querySelector("input");
  const rows = [...body.rows];
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/);
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    const shown = rows.filter((row) => !row.hidden).length;
    place.querySelector(".found").textContent = shown === rows.length ? `${shown} rows` : `${shown} of ${rows.length} rows`;
  });
}

/** Open what a link leads to, and what it lies in. */
function reveal() {
  const target = document.getElementById(location.hash.slice(1));
  for (let at = target?.closest("details"); at; at = at.parentElement.closest("details")) at.open = true;
  target?.scrollIntoView();
}

for (const details of document.querySelectorAll("details")) {
  details.addEventListener("toggle", () => details.open && fill(details));
}
window.addEventListener("hashchange", reveal);
reveal();
window.addEventListener("beforeprint", () => document.querySelectorAll("details.experiment").forEach((one) => { one.open = true; }));
