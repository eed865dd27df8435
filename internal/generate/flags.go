package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

const (
	page = "docs/flags.md"
	head = `# Flags

<!-- Written by make generate from --help=all of each daemon: do not edit. -->

All flags of the daemons. The keys of a configuration file have the same names ([configuration](configuration.md)).
A flag without a default is empty, 0 or off.
`
)

// programs are the daemons, as packages below the module's root.
var programs = []string{"nsqd", "loaddistributor", "tbadaptor", "admission", "gateway"}

// writeFlags writes docs/flags.md: all flags of the daemons, as their --help=all prints them.
func writeFlags() error {
	folder, err := os.MkdirTemp("", "generate")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	build := []string{"build", "-ldflags=-s -w", "-o", folder + string(filepath.Separator)}
	for _, p := range programs {
		build = append(build, "./"+p)
	}
	if err := command("go", build...); err != nil {
		return err
	}
	text := bytes.NewBufferString(head)
	for _, p := range programs {
		help, err := exec.Command(filepath.Join(folder, p), "--help=all").Output()
		if err != nil {
			return fmt.Errorf("%s --help=all: %w", p, err)
		}
		groups, err := parse(string(help))
		if err != nil {
			return fmt.Errorf("%s --help=all: %w", p, err)
		}
		write(text, p, groups)
	}
	return os.WriteFile(page, text.Bytes(), 0o644)
}

func command(name string, args ...string) error {
	cmd := exec.Command(name, args...)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	return cmd.Run()
}

type group struct {
	title string
	flags []entry
}

type entry struct {
	name, value, text string
}

var (
	title = regexp.MustCompile(`^(\S.*):$`)
	first = regexp.MustCompile(`^  --(\S+)(?: (\S.*?))?(?:  +(\S.*))?$`)
)

// parse reads what a daemon prints for --help=all: groups with a title, and in each group flags
// with a text in a column on the right.
func parse(help string) (groups []group, err error) {
	var last *entry
	for line := range strings.Lines(help) {
		line = strings.TrimRight(line, "\n")
		if m := title.FindStringSubmatch(line); m != nil && m[1] != "Examples" {
			groups, last = append(groups, group{title: m[1]}), nil
			continue
		}
		if len(groups) == 0 || line == "" { // the usage, or between two groups
			continue
		}
		g := &groups[len(groups)-1]
		if m := first.FindStringSubmatch(line); m != nil {
			g.flags = append(g.flags, entry{m[1], m[2], m[3]})
			last = &g.flags[len(g.flags)-1]
		} else if last != nil && strings.HasPrefix(line, "      ") {
			last.text = strings.TrimSpace(last.text + " " + strings.TrimSpace(line))
		} else {
			return nil, fmt.Errorf("cannot read the line %q", line)
		}
	}
	if len(groups) == 0 {
		return nil, fmt.Errorf("no flags in %q", help)
	}
	return groups, nil
}

var escape = strings.NewReplacer("|", `\|`, "<", "&lt;", "*", `\*`, "_", `\_`)

// write prints a table for each group of a program.
func write(out *bytes.Buffer, program string, groups []group) {
	fmt.Fprintf(out, "\n## %s\n", program)
	for _, g := range groups {
		fmt.Fprintf(out, "\n**%s**\n\n| flag | |\n|---|---|\n", g.title)
		for _, f := range g.flags {
			name := "--" + f.name
			if f.value != "" {
				name += " " + strings.ReplaceAll(f.value, "|", `\|`)
			}
			fmt.Fprintf(out, "| `%s` | %s |\n", name, escape.Replace(f.text))
		}
	}
}
