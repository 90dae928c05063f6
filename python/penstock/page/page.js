// Draws the charts as they come into view, in the reader's colours, and again when these or the unit change.
(() => {
  "use strict";
  const { dark } = JSON.parse(document.getElementById("settings").textContent);
  const inTheDark = matchMedia("(prefers-color-scheme: dark)");
  const byFinger = matchMedia("(pointer: coarse)");
  const plots = [...document.querySelectorAll(".plot")];
  const drawn = new Set();
  let printing = false;
  let unit = "seconds";

  const config = {
    responsive: true,
    displaylogo: false,
    displayModeBar: false,
    doubleClick: "reset",
    showTips: false,
  };

  function draw(plot) {
    let text = plot.parentElement.querySelector("script").textContent;
    if (inTheDark.matches && !printing) {
      // Every colour was written in its light form, which stands for one role.
      text = text.replace(/#[0-9a-f]{6}(?![0-9a-f])/g, (colour) => dark[colour] || colour);
    }
    const figures = JSON.parse(text);
    const { data, layout } = figures[unit] || figures.lanes;
    if (printing) layout.width = 1000; // the text width of A4 across
    if (byFinger.matches) layout.dragmode = false; // a finger on a chart scrolls the page
    drawn.add(plot);
    return Plotly.react(plot, data, layout, config);
  }

  const seen = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (entry.isIntersecting && !drawn.has(entry.target)) draw(entry.target);
      }
    },
    { rootMargin: "500px" },
  );
  plots.forEach((plot) => seen.observe(plot));

  const again = () => drawn.forEach(draw);
  inTheDark.addEventListener("change", again);

  for (const button of document.querySelectorAll(".switch button")) {
    button.addEventListener("click", () => {
      unit = button.value;
      for (const other of document.querySelectorAll(".switch button")) {
        other.setAttribute("aria-pressed", String(other === button));
      }
      again();
    });
  }

  // On paper: every chart, in the light colours, and what is folded up unfolded.
  let opened = [];
  addEventListener("beforeprint", () => {
    printing = true;
    opened = [...document.querySelectorAll("details:not([open])")];
    opened.forEach((details) => { details.open = true; });
    plots.forEach(draw);
  });
  addEventListener("afterprint", () => {
    printing = false;
    opened.forEach((details) => { details.open = false; });
    again();
  });

  // A click on a heading sorts by that column; rows without a figure stay at the end.
  function sort(heading) {
    const ascending = heading.getAttribute("aria-sort") !== "ascending";
    const row = heading.parentElement;
    const column = [...row.children].indexOf(heading);
    for (const other of row.children) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const value = (line) => line.children[column].dataset.value ?? "";
    const body = row.closest("table").tBodies[0];
    const sign = ascending ? 1 : -1;
    [...body.rows]
      .sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === "" || y === "") return (x === "") - (y === "");
        return sign * (isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y);
      })
      .forEach((line) => body.append(line));
  }
  for (const button of document.querySelectorAll("th button")) {
    button.addEventListener("click", () => sort(button.parentElement));
  }
})();
