package daemon

import (
	"flag"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/srtm-io/srtm/internal/service"
)

// Group is a set of related flags. The part of the program that uses the flags defines
// them.
type Group struct {
	Title string
	Flags func(*flag.FlagSet)
}

// Titles of groups in several daemons.
const (
	Listen   = "Addresses"
	Cluster  = "Cluster"
	Contract = "Contracts"
	Storage  = "Storage"
	Limits   = "Limits"
	Security = "TLS and tokens"
	Ask      = "Admission service"
	Basics   = "Configuration and log"
	Ignored  = "Accepted for compatibility; ignored"
)

// filledGroup is a group with the names of its flags, in alphabetical order.
type filledGroup struct {
	title string
	names []string
}

// fill lets every group define its flags. Groups with the same title are merged.
func fill(fs *flag.FlagSet, groups []Group) (filled []filledGroup) {
	defined := map[string]bool{}
	for _, g := range groups {
		g.Flags(fs)
		i := slices.IndexFunc(filled, func(f filledGroup) bool { return f.title == g.Title })
		if i < 0 {
			i = len(filled)
			filled = append(filled, filledGroup{title: g.Title})
		}
		fs.VisitAll(func(f *flag.Flag) {
			if !defined[f.Name] {
				defined[f.Name] = true
				filled[i].names = append(filled[i].names, f.Name)
			}
		})
		slices.Sort(filled[i].names)
	}
	return filled
}

// Names of the flags of every daemon.
const (
	configFlag  = "config"
	helpFlag    = "help"
	versionFlag = "version"
)

// The values of --help.
const (
	helpNone  = ""
	helpFirst = "true" // the most important flags
	helpAll   = "all"
)

// helpValue is the value of --help.
type helpValue string

func (h *helpValue) String() string { return string(*h) }

// IsBoolFlag makes the flag without a value mean helpFirst.
func (h *helpValue) IsBoolFlag() bool { return true }

// Set accepts helpFirst or helpAll.
func (h *helpValue) Set(s string) error {
	if s != helpFirst && s != helpAll {
		return fmt.Errorf("%q: want --help or --help=all", s)
	}
	*h = helpValue(s)
	return nil
}

const (
	helpWidth  = 100 // per line
	helpColumn = 32  // column of the flags' texts
)

// help prints the usage.
func (c *commandLine) help(out io.Writer, which helpValue) {
	fmt.Fprintf(out, "%s\n\nUsage: %s [flags]\n", c.program.About, c.program.Name)
	if c.program.Argument != "" {
		fmt.Fprintf(out, "       %s [flags] %s\n", c.program.Name, strings.ToUpper(c.program.Argument))
	}
	fmt.Fprintf(out, "\nExamples:\n%s\n", strings.TrimRight(c.program.Examples, "\n"))
	total, shown := 0, 0
	for _, g := range c.groups {
		titled := false
		for _, name := range g.names {
			if total++; which != helpAll && len(c.program.First) > 0 && !slices.Contains(c.program.First, name) {
				continue
			}
			shown++
			if !titled {
				fmt.Fprintf(out, "\n%s:\n", g.title)
				titled = true
			}
			c.printFlag(out, c.fs.Lookup(name))
		}
	}
	if shown < total {
		fmt.Fprintf(out, "\n%s --help=all shows all %d flags.\n", c.program.Name, total)
	}
}

// printFlag prints a flag's name, its value's name and its text.
func (c *commandLine) printFlag(out io.Writer, f *flag.Flag) {
	value, text := flag.UnquoteUsage(f)
	head := "  --" + f.Name
	if value != "" {
		head += " " + value
	}
	if !slices.Contains([]string{"", "0", "0s", "false"}, f.DefValue) && !strings.Contains(text, "(default ") {
		text += " (default " + f.DefValue + ")"
	}
	if port := c.defaultPort(f); port != "" && !strings.HasSuffix(f.DefValue, ":"+port) {
		text += " (default port " + port + ")"
	}
	if len(head) >= helpColumn-1 {
		fmt.Fprintln(out, head)
		head = ""
	}
	for _, line := range wrap(text, helpWidth-helpColumn) {
		fmt.Fprintf(out, "%-*s%s\n", helpColumn, head, line)
		head = ""
	}
}

// wrap breaks a text into lines of at most width bytes, unless a word is longer.
func wrap(text string, width int) (lines []string) {
	line := ""
	for word := range strings.FieldsSeq(text) {
		if line != "" && len(line)+1+len(word) > width {
			lines = append(lines, line)
			line = ""
		}
		if line != "" {
			line += " "
		}
		line += word
	}
	return append(lines, line)
}

// examples maps a value's name to a valid value, for flags without a default.
var examples = map[string]string{
	"host": "broker1.example.com", "port": "4150", "bytes": "1048576", "file": "/etc/srtm/file",
	"folder": "/var/lib/srtm", "directory": "/var/lib/srtm", "URL": "http://127.0.0.1:4317", "url": "http://127.0.0.1:4317", "user": "srtm",
	"reply": "deny", "id": "broker1", "name": "name", "prefix": "prefix",
}

// others maps an address flag to the default address of another SRTM daemon.
var others = map[string]string{
	"loaddistributor-address": "127.0.0.1:" + service.LoaddistributorPort, "tbadaptor-address": "127.0.0.1:" + service.TBAdaptorPort,
	"admission-address": "127.0.0.1:" + service.AdmissionUDPPort, "lookupd-tcp-address": "127.0.0.1:" + service.NSQLookupdPort,
}

// example returns a valid value of a flag: from the program, the flag's default, others
// or examples.
func (c *commandLine) example(f *flag.Flag) string {
	for _, values := range []map[string]string{c.program.Values, others} {
		if example := values[canonical(f)]; example != "" {
			return example
		}
	}
	if !slices.Contains([]string{"", "0", "0s", "[]"}, f.DefValue) {
		return f.DefValue
	}
	value, _ := flag.UnquoteUsage(f)
	if example := examples[value]; example != "" {
		return example
	}
	switch kind(f).(type) {
	case int, int64, uint, uint64, float64:
		return "1000"
	case time.Duration:
		return "30s"
	}
	return ""
}
