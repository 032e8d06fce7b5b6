// A button on every block of code that copies its text, without the prompts and outputs of a session.
function addCopyButton(block) {
  const button = document.createElement("button");
  button.className = "copy-code";
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    const lines = block.querySelector("pre").innerText.split("\n");
    const prompts = lines.filter((line) => /^(>>>|\.\.\.)( |$)/.test(line));
    const text = prompts.length ? prompts.map((line) => line.slice(4)).join("\n") : lines.join("\n");
    try {
      await navigator.clipboard.writeText(text.trimEnd() + "\n");
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  block.append(button);
}

// Drawings in text keep their lines. One that is a little too wide gets smaller letters; a wider one scrolls.
const SMALLEST = 0.72;  // of the size that code has: about 9 pixels

function fit(pre) {
  pre.style.fontSize = "";
  const style = getComputedStyle(pre);
  const padding = parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
  const scale = (pre.clientWidth - padding) / (pre.scrollWidth - padding);
  if (scale < 1 && scale >= SMALLEST) pre.style.fontSize = `${0.99 * scale * parseFloat(style.fontSize)}px`;
}

// In tables of many columns names may break after an underscore.
function letBreak(name) {
  name.innerHTML = name.innerHTML.replaceAll("_", "_<wbr>");
}

document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("table:has(th:nth-child(6)) code span.pre").forEach(letBreak);
  for (const block of document.querySelectorAll("div.highlight")) {
    if (!block.closest(".highlight-none, .highlight-text, .output")) addCopyButton(block);
  }
  const drawings = document.querySelectorAll(":is(.highlight-none, .highlight-text) pre");
  const fitAll = () => drawings.forEach(fit);
  fitAll();
  addEventListener("resize", fitAll);
});
