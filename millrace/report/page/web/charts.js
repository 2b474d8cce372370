// The charts: Plotly with the colours of the page.

const charts = [];

async function load(code) {
  if (!charts.length) return;
  const script = document.createElement("script");
  script.nonce = document.querySelector("script[nonce]").nonce;
  script.textContent = code;
  document.head.append(script);
  for (const [place, block] of charts) {
    await Plotly.newPlot(place, block.data, themed(block), {
      responsive: true, displaylogo: false, showLink: false,
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
    });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    charts.forEach(([place, block]) => Plotly.relayout(place, themed(block)));
  });
}

function themed(block) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const narrow = innerWidth < 640;
  const layout = {
    hovermode: "closest",
    margin: { l: 56, r: 8, t: 24, b: 40 },
    legend: { orientation: "h", y: 1, yanchor: "bottom", x: 0, font: { size: narrow ? 10 : 12 } },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    ...structuredClone(block.layout),
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("--front"), size: narrow ? 10 : 12 },
  };
  for (const name of ["xaxis", ...Object.keys(block.layout).filter((key) => key.startsWith("yaxis"))]) {
    layout[name] = { automargin: true, gridcolor: colour("--grid"), zerolinecolor: colour("--grid"), ...layout[name] };
  }
  return layout;
}
