package plan

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/big"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// scenario is the content of a file:
//
//	{"brokers": [{"id": "b1", "mcap": 64000, "allocated": 10000}],
//	 "topic": {"name": "t", "rate": 80000, "burst": 100,
//	           "groups": [{"key": "g1", "count": 25, "rate": 10, "batch": 1}],
//	           "publishers": [{"id": "p1", "key": "g1", "rate": 10, "batch": 1}]}}
//
// Rates are in msg/s, the topic's rate to a thousandth. allocated, key, batch, groups and
// publishers are optional.
type scenario struct {
	brokers []placement.Broker
	demand  placement.Demand
	// faults of form. The faulty fields are zero in brokers and demand.
	faults placement.FieldErrors
}

// maxFile limits the size of a file in bytes.
const maxFile = 256 << 20

// parse reads a scenario and collects its faults of form. placement checks the values.
// The error says where the input stops being JSON.
func parse(r io.Reader) (scenario, error) {
	data, err := io.ReadAll(io.LimitReader(r, maxFile+1))
	if err != nil {
		return scenario{}, err
	}
	if len(data) > maxFile {
		return scenario{}, fmt.Errorf("longer than %d bytes", maxFile)
	}
	var raw json.RawMessage
	d := json.NewDecoder(bytes.NewReader(data))
	if err := d.Decode(&raw); err != nil {
		if errors.Is(err, io.EOF) {
			return scenario{}, errors.New("is empty")
		}
		if syntax := (*json.SyntaxError)(nil); errors.As(err, &syntax) {
			return scenario{}, fmt.Errorf("line %d: %w", line(data, syntax.Offset), err)
		}
		return scenario{}, err
	}
	if more := bytes.TrimLeft(data[d.InputOffset():], " \t\r\n"); len(more) > 0 {
		return scenario{}, fmt.Errorf("line %d: more input after the scenario", line(data, int64(len(data)-len(more)+1)))
	}

	var read file
	var f form
	f.value(raw, "", reflect.ValueOf(&read).Elem())
	t := read.Topic
	return scenario{brokers: read.Brokers, faults: f.faults, demand: placement.Demand{
		Topic: t.Name, Rate: (int64(t.Rate) + 999) / 1000, RateMilli: int64(t.Rate), Burst: t.Burst, Groups: t.Groups, Publishers: t.Publishers,
	}}, nil
}

// file is the form of a scenario. shapes lists the field names of each object in lower
// case, required fields with a "!".
type file struct {
	Brokers []placement.Broker
	Topic   topic
}

type topic struct {
	Name       string
	Rate       milli
	Burst      int64
	Groups     []placement.Group
	Publishers []placement.Publisher
}

// milli is a rate in 1/1000 msg/s, parsed from msg/s.
type milli int64

var shapes = map[reflect.Type][]string{
	reflect.TypeFor[file]():                {"brokers!", "topic!"},
	reflect.TypeFor[topic]():               {"name!", "rate!", "burst!", "groups", "publishers"},
	reflect.TypeFor[placement.Broker]():    {"id!", "mcap!", "allocated"},
	reflect.TypeFor[placement.Group]():     {"count!", "rate!", "key", "batch"},
	reflect.TypeFor[placement.Publisher](): {"id!", "rate!", "key", "batch"},
}

// inForm merges the faults found by placement into the faults of form, under the names of
// the file. It leaves out faults caused by a fault of form.
func (s scenario) inForm(found placement.FieldErrors) placement.FieldErrors {
	all := slices.Clone(s.faults)
	for _, f := range found {
		switch {
		case f.Field == "topic":
			f.Field = "topic.name"
		case !strings.HasPrefix(f.Field, "brokers["):
			f.Field = "topic." + f.Field
		}
		if !slices.ContainsFunc(s.faults, func(g placement.FieldError) bool { return isInside(f.Field, g.Field) }) {
			all = append(all, f)
		}
	}
	return all
}

// isInside reports whether the field at path is outer, or is inside outer.
func isInside(path, outer string) bool {
	rest, ok := strings.CutPrefix(path, outer)
	return outer == root || ok && (rest == "" || rest[0] == '.' || rest[0] == '[')
}

func line(data []byte, offset int64) int {
	return 1 + bytes.Count(data[:min(int64(len(data)), max(0, offset-1))], []byte("\n"))
}

// form reads JSON values and collects faults of form: unknown, missing or repeated
// fields, and values of the wrong type.
type form struct{ faults placement.FieldErrors }

// root names the whole input in faults.
const root = "scenario"

func (f *form) fault(at, format string, args ...any) {
	if at == "" {
		at = root
	}
	f.faults = append(f.faults, placement.FieldError{Field: at, Problem: fmt.Sprintf(format, args...)})
}

// value reads v into to: a struct of shapes, a list, a text or a number.
func (f *form) value(v json.RawMessage, at string, to reflect.Value) {
	switch to.Kind() {
	case reflect.Struct:
		f.object(v, at, to)
	case reflect.Slice:
		f.list(v, at, to)
	case reflect.String:
		if v[0] != '"' || json.Unmarshal(v, to.Addr().Interface()) != nil {
			f.fault(at, "is %s, want a text", kind(v))
		}
	case reflect.Float64:
		if !isNumber(v) {
			f.fault(at, "is %s, want a number", kind(v))
			return
		}
		n, err := strconv.ParseFloat(string(v), 64)
		if to.SetFloat(n); err != nil {
			f.fault(at, "%s is out of range", v)
		}
	case reflect.Int: // a count
		n := f.scaled(v, at, 1, "a whole number")
		if n < math.MinInt32 || n > math.MaxInt32 {
			f.fault(at, "%d is out of range", n)
			return
		}
		to.SetInt(n)
	default:
		if to.Type() == reflect.TypeFor[milli]() {
			to.SetInt(f.scaled(v, at, 1000, "a rate with at most three decimals"))
			return
		}
		to.SetInt(f.scaled(v, at, 1, "a whole number"))
	}
}

// object reads an object, its fields in the order of the input.
func (f *form) object(v json.RawMessage, at string, to reflect.Value) {
	d := json.NewDecoder(bytes.NewReader(v))
	if open, err := d.Token(); err != nil || open != json.Delim('{') {
		f.fault(at, "is %s, want an object", kind(v))
		return
	}
	prefix := at
	if at != "" {
		prefix += "."
	}
	shape := shapes[to.Type()]
	var seen []string
	for d.More() {
		// The whole input is known to be well-formed.
		token, _ := d.Token()
		name, _ := token.(string)
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			f.fault(prefix+name, "%v", err)
			return
		}
		switch {
		case !slices.Contains(shape, name) && !slices.Contains(shape, name+"!"):
			f.fault(prefix+name, "unknown field")
		case slices.Contains(seen, name):
			f.fault(prefix+name, "appears twice")
		default:
			seen = append(seen, name)
			f.value(value, prefix+name, to.FieldByNameFunc(func(field string) bool { return strings.EqualFold(field, name) }))
		}
	}
	for _, field := range shape {
		if name, must := strings.CutSuffix(field, "!"); must && !slices.Contains(seen, name) {
			f.fault(prefix+name, "is missing")
		}
	}
}

func (f *form) list(v json.RawMessage, at string, to reflect.Value) {
	d := json.NewDecoder(bytes.NewReader(v))
	if open, err := d.Token(); err != nil || open != json.Delim('[') {
		f.fault(at, "is %s, want a list", kind(v))
		return
	}
	for i := 0; d.More(); i++ {
		var value json.RawMessage
		element := at + "[" + strconv.Itoa(i) + "]"
		if err := d.Decode(&value); err != nil {
			f.fault(element, "%v", err)
			return
		}
		to.Set(reflect.Append(to, reflect.Zero(to.Type().Elem())))
		f.value(value, element, to.Index(i))
	}
}

// scaled returns scale times a number. The product must be an integer: 64000, 64000.0 and
// 6.4e4 are. With a fault it returns 0.
func (f *form) scaled(v json.RawMessage, at string, scale int64, want string) int64 {
	if !isNumber(v) {
		f.fault(at, "is %s, want %s", kind(v), want)
		return 0
	}
	// A float first: an exponent such as 1e999999999 must not reach big.Rat.
	approx, err := strconv.ParseFloat(string(v), 64)
	if err != nil || math.Abs(approx)*float64(scale) >= math.MaxInt64 {
		f.fault(at, "%s is out of range", v)
		return 0
	}
	exact, ok := new(big.Rat), approx == 0 || math.Abs(approx) > 1e-9
	if ok {
		_, ok = exact.SetString(string(v))
	}
	exact.Mul(exact, new(big.Rat).SetInt64(scale))
	if !ok || !exact.IsInt() {
		f.fault(at, "is %s, want %s", v, want)
		return 0
	}
	return exact.Num().Int64()
}

func isNumber(v json.RawMessage) bool { return v[0] == '-' || v[0] >= '0' && v[0] <= '9' }

// kind describes v for people.
func kind(v json.RawMessage) string {
	switch {
	case v[0] == '{':
		return "an object"
	case v[0] == '[':
		return "a list"
	case v[0] == '"':
		return "the text " + clip(string(v))
	default:
		return clip(string(v)) // a number, true, false or null
	}
}

func clip(s string) string {
	const limit = 40
	if len(s) > limit {
		return strings.ToValidUTF8(s[:limit], "") + "..."
	}
	return s
}
