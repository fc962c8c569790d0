// Sorts and filters tables: a button in each header, a search field above each table.
"use strict";
(function () {
  function key(row, column) {
    const cell = row.cells[column];
    const text = cell.textContent.trim();
    if ("value" in cell.dataset) return Number(cell.dataset.value);
    return cell.className === "number" && text !== "-" ? Number(text) : text.toLowerCase();
  }

  function compare(a, b) {
    if (typeof a === "number" && typeof b === "number") return a - b;
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    return a.localeCompare(b, undefined, { numeric: true });
  }

  function sort(table, column, header) {
    const falling = header.getAttribute("aria-sort") === "ascending";
    for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
    header.setAttribute("aria-sort", falling ? "descending" : "ascending");
    const body = table.tBodies[0];
    const rows = [...body.rows].sort((a, b) => compare(key(a, column), key(b, column)));
    if (falling) rows.reverse();
    body.append(...rows);
  }

  for (const part of document.querySelectorAll("details.table")) {
    const table = part.querySelector("table");
    if (!table.tHead) continue;
    [...table.tHead.rows[0].cells].forEach((header, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = header.textContent;
      button.addEventListener("click", () => sort(table, column, header));
      header.replaceChildren(button);
    });
    const input = part.querySelector("input");
    const told = part.querySelector("output");
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of table.tBodies[0].rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        shown += !row.hidden;
      }
      told.textContent = words.length ? `${shown} of ${table.tBodies[0].rows.length} rows` : "";
    });
  }
})();
