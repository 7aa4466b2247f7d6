"use strict";
// Tables sort by a click on a heading: one way, the other way, as they were. Figures open large. Without scripts the page reads the same.
function valueOf(row, column) {
  const text = row.cells[column] ? row.cells[column].textContent.trim() : "";
  const found = text.replace(/,/g, "").match(/^[<>]?\s*([+−-]?\d+(\.\d+)?)/);
  return found ? Number(found[1].replace("−", "-")) : text && text !== "–" ? text.toLowerCase() : null;
}
function sorted(rows, column, way) {
  return [...rows].sort((a, b) => {
    const [left, right] = [valueOf(a, column), valueOf(b, column)];
    if (left === null || right === null) return (left === null) - (right === null);
    if (typeof left !== typeof right) return typeof left === "number" ? -1 : 1;
    return way * (typeof left === "number" ? left - right : left.localeCompare(right));
  });
}
for (const table of document.querySelectorAll("table")) {
  const head = table.tHead && table.tHead.rows[table.tHead.rows.length - 1], body = table.tBodies[0];
  if (!head || !body || body.rows.length < 2 || table.querySelector("tbody [colspan]") || table.closest(".columns")) continue;
  const before = [...body.rows];
  [...head.cells].forEach((cell, column) => {
    const turn = () => {
      const numbers = before.some((row) => typeof valueOf(row, column) === "number");
      const ways = numbers ? ["", "descending", "ascending"] : ["", "ascending", "descending"];
      const next = ways[(ways.indexOf(cell.getAttribute("aria-sort") || "") + 1) % 3];
      for (const other of head.cells) other.removeAttribute("aria-sort");
      if (next) cell.setAttribute("aria-sort", next);
      table.classList.toggle("sorted", next !== "");
      body.append(...(next ? sorted(before, column, next === "ascending" ? 1 : -1) : before));
    };
    cell.tabIndex = 0;
    cell.classList.add("sortable");
    cell.title = "Sort by this column";
    cell.addEventListener("click", turn);
    cell.addEventListener("keydown", (key) => { if (key.key === "Enter" || key.key === " ") { key.preventDefault(); turn(); } });
  });
}
const large = document.createElement("dialog");
large.className = "large";
large.addEventListener("click", () => large.close());
document.body.append(large);
for (const image of document.querySelectorAll("figure img")) {
  const open = () => {
    const copy = image.cloneNode(), words = document.createElement("p"), caption = image.parentElement.querySelector("figcaption");
    copy.removeAttribute("width");
    copy.removeAttribute("tabindex");
    words.className = "note";
    words.textContent = caption ? caption.textContent : image.alt;
    large.replaceChildren(copy, words);
    large.showModal();
  };
  image.tabIndex = 0;
  image.setAttribute("role", "button");
  image.title = "Show large";
  image.addEventListener("click", open);
  image.addEventListener("keydown", (key) => { if (key.key === "Enter") open(); });
}
