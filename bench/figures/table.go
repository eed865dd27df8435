package figures

import (
	"encoding/csv"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

var rowHeader = []string{"figure", "quantity", "paper", "simulated", "live", "note"}

func writeRows(path string, rows []row) error {
	all := [][]string{rowHeader}
	for _, r := range rows {
		all = append(all, []string{r.Figure, r.Quantity, r.Paper, r.Simulated, r.Live, r.Note})
	}
	return writeCSV(path, all)
}

func readRows(path string) (rows []row, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close() // read only
	r := csv.NewReader(f)
	r.FieldsPerRecord = len(rowHeader)
	all, err := r.ReadAll()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	for i, c := range all {
		if i > 0 {
			rows = append(rows, row{c[0], c[1], c[2], c[3], c[4], c[5]})
		}
	}
	return rows, nil
}

// Lines of a page around the table of its figures.
const (
	tableBegin = "<!-- figures: begin -->"
	tableEnd   = "<!-- figures: end -->"
)

// updatePages replaces the table of each page in a folder by the rows of the page's figures.
func updatePages(pages, folder string) error {
	tables := make(map[string]*strings.Builder)
	for _, f := range figures {
		rows, err := readRows(filepath.Join(folder, "rows-"+f.name+".csv"))
		if os.IsNotExist(err) {
			continue // not made yet
		}
		if err != nil {
			return err
		}
		b := tables[f.page]
		if b == nil {
			b = new(strings.Builder)
			b.WriteString("| figure | quantity | paper | simulated | live | note |\n|---|---|---|---|---|---|\n")
			tables[f.page] = b
		}
		for _, r := range rows {
			cells := []string{r.Figure, r.Quantity, r.Paper, r.Simulated, r.Live, r.Note}
			for i, c := range cells {
				if c == "" {
					cells[i] = "–"
				}
				cells[i] = strings.ReplaceAll(cells[i], "|", "\\|")
			}
			b.WriteString("| " + strings.Join(cells, " | ") + " |\n")
		}
	}
	for page, table := range tables {
		if err := updatePage(filepath.Join(pages, page+".md"), table.String()); err != nil {
			return err
		}
	}
	return nil
}

// updatePage replaces the table of a page.
func updatePage(path, table string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	before, rest, found := strings.Cut(string(text), tableBegin)
	_, after, closed := strings.Cut(rest, tableEnd)
	if !found || !closed {
		return fmt.Errorf("%s: no line %q followed by %q", path, tableBegin, tableEnd)
	}
	updated := before + tableBegin + "\n" + table + tableEnd + after
	if updated == string(text) {
		return nil
	}
	return os.WriteFile(path, []byte(updated), 0o644)
}
