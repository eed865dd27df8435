package figures

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

const pagesFolder = "../../docs/evaluation"

var (
	numbers = regexp.MustCompile(`[0-9]([0-9,]*[0-9])?(\.[0-9]+)?`)
	// notText matches links, code, images and names of figures, in which numbers mean nothing else.
	notText = regexp.MustCompile("!?\\[[^]]*\\]\\([^)]*\\)|`[^`]*`|[A-Z]+-[0-9]+|(?m:^    .*$)|(?i:figures?|tables?|section) [0-9I]+(\\([a-d]\\))?(,? (and|to) [0-9]+)?")
)

// pageNames returns the pages that have figures.
func pageNames() (all []string) {
	for _, f := range figures {
		if !slices.Contains(all, f.page) {
			all = append(all, f.page)
		}
	}
	return all
}

// unproven returns the numbers in the text of a page that the page's table lacks. Lists of assumptions and of
// differences from the paper may have other numbers.
func unproven(page string) (missing []string) {
	text, rest, _ := strings.Cut(page, tableBegin)
	table, after, _ := strings.Cut(rest, tableEnd)
	known := numbers.FindAllString(table, -1)
	for _, section := range strings.Split(text+after, "\n## ") {
		title, _, _ := strings.Cut(section, "\n")
		if slices.Contains([]string{"Assumptions", "Where we differ from the paper", "What could not be made", "What is missing"}, title) {
			continue
		}
		for _, n := range numbers.FindAllString(notText.ReplaceAllString(section, ""), -1) {
			if !slices.Contains(known, n) && n != "1" && n != "0" {
				missing = append(missing, n)
			}
		}
	}
	return missing
}

// Every number in the text comes from a file that a run wrote.
func TestNumbersOfPages(t *testing.T) {
	for _, name := range pageNames() {
		page := read(t, filepath.Join(pagesFolder, name+".md"))
		if missing := unproven(page); len(missing) > 0 {
			t.Errorf("%s.md: its table has no %s", name, strings.Join(missing, ", "))
		}
	}
}

func TestUnprovenNumbers(t *testing.T) {
	page := "# Title\nFigure 7: 1,000 of 12.5 ms, [3](x4.svg) and `5`\n\n    make 6\n## Assumptions\n42\n" + tableBegin + "\n| 12.5 ± 0.1 |\n" + tableEnd + "\n## What came out\n0.1 and 8 at 0.10\n"
	testkit.EqualSlices(t, unproven(page), []string{"1,000", "8", "0.10"}, "numbers without a file")
}

// The tables of the pages show the files beside the pages.
func TestTablesOfPages(t *testing.T) {
	folder := t.TempDir()
	for _, name := range pageNames() {
		testkit.Must(t, os.WriteFile(filepath.Join(folder, name+".md"), []byte(read(t, filepath.Join(pagesFolder, name+".md"))), 0o644))
	}
	testkit.Must(t, updatePages(folder, pagesFolder))
	for _, name := range pageNames() {
		if read(t, filepath.Join(pagesFolder, name+".md")) != read(t, filepath.Join(folder, name+".md")) {
			t.Errorf("%s.md: its table differs from the files beside it; make figures writes the table", name)
		}
	}
}

// stated matches the paper's own words and the numbers of a cell.
var stated = regexp.MustCompile("“[^”]*”|" + numbers.String())

// foreign returns the words and numbers in the paper's column that the drivers do not have.
func foreign(cell, drivers string) (missing []string) {
	for _, part := range stated.FindAllString(cell, -1) {
		if !strings.Contains(drivers, part) && !strings.Contains(drivers, strings.ReplaceAll(part, ",", "_")) {
			missing = append(missing, part)
		}
	}
	return missing
}

// The paper's column is an input. The drivers have the input, whichever driver wrote the table last.
func TestPapersColumnComesFromDrivers(t *testing.T) {
	var drivers strings.Builder
	for _, name := range testkit.Result(filepath.Glob("*.go")).Must(t) {
		if !strings.HasSuffix(name, "_test.go") {
			drivers.WriteString(read(t, name))
		}
	}
	for _, f := range figures {
		for _, r := range testkit.Result(readRows(filepath.Join(pagesFolder, "rows-"+f.name+".csv"))).Must(t) {
			if r.Paper == "" {
				continue
			}
			if missing := foreign(r.Paper, drivers.String()); len(missing) > 0 {
				t.Errorf("rows-%s.csv, %s, %s: no driver has %s", f.name, r.Figure, r.Quantity, strings.Join(missing, ", "))
			}
		}
	}
}

func TestForeignStatements(t *testing.T) {
	drivers := `Paper: "14.7 ms, “even worse”"`
	testkit.EqualSlices(t, foreign("14.7 ms; “even worse”; “better”, 14.8", drivers), []string{"“better”", "14.8"}, "statements without a driver")
}
