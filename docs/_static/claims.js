// The table of claims: a click on a heading sorts, words and a verdict filter. Without scripts it is a plain table.
document.addEventListener("DOMContentLoaded", () => {
  const table = document.querySelector("table.claims");
  if (!table) return;
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const headings = [...table.tHead.rows[0].cells];
  const text = (row, column) => row.cells[column].textContent.trim();
  rows.forEach((row) => [...row.cells].forEach((cell, i) => (cell.dataset.name = headings[i].textContent)));

  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.append(...heading.childNodes);
    heading.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") === "ascending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      rows.sort((a, b) => text(a, column).localeCompare(text(b, column), "en", { numeric: true }) * (down ? -1 : 1));
      body.replaceChildren(...rows);
    });
  });

  const verdict = headings.findIndex((heading) => heading.textContent.trim() === "verdict");
  const controls = document.createElement("p");
  controls.className = "claims-filter";
  controls.innerHTML = '<label>Find <input type="search"></label> <label>Verdict <select><option>all</option></select></label> <span role="status"></span>';
  const [search, select, status] = controls.querySelectorAll("input, select, span");
  for (const kind of new Set(rows.map((row) => text(row, verdict)))) select.add(new Option(kind));
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/);
    rows.forEach((row) => {
      const all = row.textContent.toLowerCase();
      const kind = select.value === "all" || text(row, verdict) === select.value;
      row.hidden = !(kind && words.every((word) => all.includes(word)));
    });
    status.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} claims`;
  };
  search.addEventListener("input", filter);
  select.addEventListener("change", filter);
  (table.closest(".table-wrapper") ?? table).before(controls);
  filter();
});
