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

// Lines of the document around the table of all figures.
const (
	tableBegin = "<!-- figures: begin -->"
	tableEnd   = "<!-- figures: end -->"
)

// updateDoc replaces the document's table by the rows of all figures in the folder.
func updateDoc(doc, folder string) error {
	text, err := os.ReadFile(doc)
	if err != nil {
		return err
	}
	before, rest, found := strings.Cut(string(text), tableBegin)
	_, after, closed := strings.Cut(rest, tableEnd)
	if !found || !closed {
		return fmt.Errorf("%s: no line %q followed by %q", doc, tableBegin, tableEnd)
	}
	var b strings.Builder
	b.WriteString("| figure | quantity | paper | simulated | live | note |\n|---|---|---|---|---|---|\n")
	for _, f := range figures {
		rows, err := readRows(filepath.Join(folder, "rows-"+f.name+".csv"))
		if os.IsNotExist(err) {
			continue // not made yet
		}
		if err != nil {
			return err
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
	made := before + tableBegin + "\n" + b.String() + tableEnd + after
	if made == string(text) {
		return nil
	}
	return os.WriteFile(doc, []byte(made), 0o644)
}
