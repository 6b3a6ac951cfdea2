// The commands of the API page, with the address under which it is open.

for (const one of document.querySelectorAll(".origin")) one.textContent = location.origin;
