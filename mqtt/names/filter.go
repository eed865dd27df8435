package names

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// Limits of topic names and filters. An attribute has MaxAttribute bytes: nine for flags and
// a tag, the others for the name.
const (
	MaxName   = MaxAttribute - 9 // bytes of a topic name or filter
	MaxLevels = 32               // levels of a topic name or filter
)

// ErrLimit means that a name or filter is valid in MQTT and exceeds MaxName or MaxLevels.
var ErrLimit = errors.New("exceeds a limit of this server")

// Faults of names and filters.
var (
	errEmpty    = errors.New("is empty")
	errLong     = fmt.Errorf("is longer than %d bytes and %w", MaxName, ErrLimit)
	errDeep     = fmt.Errorf("has more than %d levels and %w", MaxLevels, ErrLimit)
	errText     = errors.New("is not UTF-8, or contains a zero byte")
	errWildcard = errors.New("has a wildcard beside other characters, or # before the last level")
	errNoName   = errors.New("contains a wildcard")
)

// CheckName returns what is wrong with a topic name of a PUBLISH, or nil.
func CheckName(name []byte) error {
	wild, err := checkText(name)
	if wild {
		return errNoName
	}
	return err
}

// CheckFilter returns what is wrong with a filter, or nil. The filter has no $share prefix.
func CheckFilter(filter string) error {
	wild, err := checkText([]byte(filter))
	if !wild || err != nil {
		return err
	}
	rest := filter
	for more := true; more; {
		var level string
		level, rest, more = strings.Cut(rest, "/")
		if strings.ContainsAny(level, "+#") && len(level) > 1 || level == "#" && more {
			return errWildcard
		}
	}
	return nil
}

// checkText checks the rules that names and filters share, and reports whether text has wildcards.
func checkText(text []byte) (wild bool, err error) {
	levels, ascii, zero := 1, true, false
	for _, c := range text {
		switch {
		case c == '/':
			levels++
		case c == '+' || c == '#':
			wild = true
		case c == 0:
			zero = true
		case c >= utf8.RuneSelf:
			ascii = false
		}
	}
	switch {
	case len(text) == 0:
		return wild, errEmpty
	case zero || !ascii && !utf8.Valid(text):
		return wild, errText
	case len(text) > MaxName:
		return wild, errLong
	case levels > MaxLevels:
		return wild, errDeep
	}
	return wild, nil
}

// Wildcards reports whether a filter has wildcards.
func Wildcards(filter string) bool { return strings.ContainsAny(filter, "+#") }

// Match reports whether a valid filter selects a valid name. A wildcard in the first level selects no
// name that begins with $.
func Match(filter string, name []byte) bool {
	if hidden(filter, name) {
		return false
	}
	i, k := 0, 0 // starts of the current levels
	for {
		switch {
		case i < len(filter) && filter[i] == '#':
			return true
		case i < len(filter) && filter[i] == '+':
			i++
			for k < len(name) && name[k] != '/' {
				k++
			}
		default:
			for ; i < len(filter) && filter[i] != '/'; i, k = i+1, k+1 {
				if k == len(name) || name[k] != filter[i] {
					return false
				}
			}
			if k < len(name) && name[k] != '/' {
				return false
			}
		}
		switch { // both levels have ended
		case i == len(filter):
			return k == len(name)
		case k == len(name):
			return filter[i:] == "/#"
		}
		i, k = i+1, k+1
	}
}

// hidden reports whether the first level of the filter is a wildcard and the other text begins with $.
func hidden[T ~string | ~[]byte](filter string, other T) bool {
	return len(other) > 0 && other[0] == '$' && len(filter) > 0 && (filter[0] == '+' || filter[0] == '#')
}

// canonical returns a filter that matches the same names, and whose # stands for no empty name.
func canonical(filter string) string {
	switch filter {
	case "#":
		return "+/#"
	case "/#":
		return "/+/#"
	}
	return filter
}

// Overlap reports whether some name matches both valid filters.
func Overlap(a, b string) bool {
	if hidden(a, b) || hidden(b, a) {
		return false
	}
	a, b = canonical(a), canonical(b)
	for {
		la, restA, moreA := strings.Cut(a, "/")
		lb, restB, moreB := strings.Cut(b, "/")
		switch {
		case la == "#" || lb == "#":
			return true
		case la != lb && la != "+" && lb != "+":
			return false
		case !moreA && !moreB:
			return true
		case !moreA:
			return restB == "#"
		case !moreB:
			return restA == "#"
		}
		a, b = restA, restB
	}
}

// Covers reports whether every name that matches narrow also matches wide. Both are valid filters.
func Covers(wide, narrow string) bool {
	if hidden(wide, narrow) {
		return false
	}
	narrow = canonical(narrow)
	for {
		lw, restWide, moreWide := strings.Cut(wide, "/")
		ln, restNarrow, moreNarrow := strings.Cut(narrow, "/")
		switch {
		case lw == "#":
			return true
		case ln == "#" || lw != ln && lw != "+":
			return false
		case !moreNarrow:
			return !moreWide || restWide == "#"
		case !moreWide:
			return false
		}
		wide, narrow = restWide, restNarrow
	}
}
