"use strict";
// What a page can do beyond being read: say a mark's values when it is pointed at, sort a table, save it as CSV.
(() => {
  const number = /[+-]?\d[\d.]*(?:e[+-]?\d+)?/i;
  const text = (cell) => cell.textContent.trim().replace(/\s+/g, " ");

  function value(cell) {
    const found = text(cell).match(number);
    return found ? Number(found[0]) : null;
  }

  function sort(table, column, button) {
    const body = table.tBodies[0], rows = [...body.rows];
    const cells = rows.map((row) => row.cells[column]);
    const down = button.parentElement.getAttribute("aria-sort") === "ascending";
    const numeric = column > 0 && cells.filter((cell) => /^[+-]?\d/.test(text(cell))).length * 2 > cells.length;
    const order = (a, b) => {
      const [one, two] = [a.cells[column], b.cells[column]];
      if (!numeric) return text(one).localeCompare(text(two), "en", { numeric: true });
      return (value(one) ?? Infinity) - (value(two) ?? Infinity);
    };
    rows.sort((a, b) => (down ? -order(a, b) : order(a, b)));
    for (const head of table.tHead.rows[0].cells) head.removeAttribute("aria-sort");
    button.parentElement.setAttribute("aria-sort", down ? "descending" : "ascending");
    body.append(...rows);
  }

  function csv(table) {
    const quote = (cell) => {
      const said = [...cell.querySelectorAll("p")].map(text).join("; ") || text(cell);
      return /[",\n]/.test(said) ? `"${said.replaceAll('"', '""')}"` : said;
    };
    return [...table.rows].map((row) => [...row.cells].map(quote).join(",")).join("\r\n") + "\r\n";
  }

  function save(table, name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([csv(table)], { type: "text/csv" }));
    link.download = `${name}.csv`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  for (const [index, table] of [...document.querySelectorAll("table.sort")].entries()) {
    for (const [column, head] of [...table.tHead.rows[0].cells].entries()) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      button.addEventListener("click", () => sort(table, column, button));
      head.append(button);
    }
    const box = table.parentElement, button = document.createElement("button");
    const about = (box.getAttribute("aria-label") || "table").replace(/[^A-Za-z0-9]+/g, "-").toLowerCase();
    button.type = "button";
    button.className = "csv";
    button.textContent = "CSV";
    button.title = "save this table as CSV";
    button.addEventListener("click", () => save(table, `${about}-${index + 1}`));
    box.before(button);
  }

  const tip = document.createElement("div");
  tip.id = "tip";
  tip.setAttribute("role", "tooltip");
  tip.hidden = true;
  document.body.append(tip);
  let shown = null;

  function show(mark) {
    if (mark === shown) return;
    shown = mark;
    tip.hidden = !mark;
    if (!mark) return;
    tip.textContent = mark.dataset.tip;
    const at = mark.getBoundingClientRect(), own = tip.getBoundingClientRect();
    const left = Math.min(Math.max(8, at.left + at.width / 2 - own.width / 2), innerWidth - own.width - 8);
    const above = at.top - own.height - 8;
    tip.style.left = `${left}px`;
    tip.style.top = `${above > 4 ? above : at.bottom + 8}px`;
  }

  const mark = (event) => event.target.closest?.("[data-tip]") ?? null;
  document.addEventListener("pointerover", (event) => show(mark(event)));
  document.addEventListener("focusin", (event) => show(mark(event)));
  document.addEventListener("focusout", () => show(null));
  document.addEventListener("scroll", () => show(null), { passive: true });
  document.addEventListener("keydown", (event) => event.key === "Escape" && show(null));
  const open = () => document.getElementById(location.hash.slice(1))?.closest("details")?.setAttribute("open", "");
  addEventListener("hashchange", open);
  open();
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((fold) => (fold.open = true)));
})();
