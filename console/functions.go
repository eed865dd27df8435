package console

import (
	"fmt"
	"html/template"
	"math"
	"net/url"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/console/why"
	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/internal/topics"
)

// functions are the functions of templates.
var functions = template.FuncMap{
	"count":      func(v any) string { return thousands(fmt.Sprint(v)) },
	"noun":       noun,
	"rate":       func(v float64) string { return thousands(strconv.FormatFloat(v, 'f', -1, 64)) },
	"measured":   func(v float32) string { return measured(float64(v)) },
	"measured32": measured,
	"milli":      milli,
	"times":      times,
	"scheduler":  scheduler,
	"balance":    balance,
	"ms":         func(v float32) string { return why.Duration(time.Duration(float64(v) * 1e6)) },
	"duration":   why.Duration,
	"p99": func(l *histogram.Latency) string {
		if l.Count() == 0 {
			return "–"
		}
		return why.Duration(l.Quantile(0.99))
	},
	"ratio":      func(part, whole uint64) float64 { return float64(part) / float64(whole) },
	"percent":    func(v float64) string { return strconv.FormatFloat(100*v, 'f', 2, 64) + " %" },
	"clock":      func(ms int64) string { return time.UnixMilli(ms).UTC().Format("15:04:05") },
	"state":      topics.State,
	"stateClass": stateClass,
	"moveReason": topics.MoveReason,
	"slo":        topics.SLO,
	"expiry":     topics.ExpiryText,
	"seconds":    func(d *durationpb.Duration) string { return d.AsDuration().String() },
	"channels":   channelExpiryLines,
	"list":       func(all ...string) []string { return all },
	"th":         func(text string) head { return head{Text: text} },
	"thn":        func(text string) head { return head{Text: text, Number: true} },
	"term":       term,
	"do": func(u user, what, text, class string, pairs ...string) pressed {
		return pressed{u, what, text, class, pairs}
	},
	"field": func(id, text, help string, form url.Values) field { return field{id, text, help, form.Get(id), nil} },
	"choice": func(id, text, help string, form url.Values, choices ...string) field {
		return field{id, text, help, form.Get(id), choices}
	},
	"sentences": sentences,
	"contract":  contractForm,
	"bytes":     size,
	"refill":    refill,
	"part":      func(name string, percent float64) resource { return resource{name, percent} },
	"millis":    func(ms int64) string { return why.Duration(time.Duration(ms) * time.Millisecond) },
	"isDefault": func(key string) bool { return strings.HasSuffix(key, "*") },
	"query":     query,
}

// milli formats thousandths.
func milli(v int64) string { return thousands(strconv.FormatFloat(float64(v)/1000, 'f', -1, 64)) }

// noun returns the form of a noun that follows the count v.
func noun(v any, text string) string {
	if fmt.Sprint(v) == "1" {
		return text
	}
	return plural.Noun(0, text)
}

// term links a word to the glossary, where the entry may have another form.
func term(entry string, text ...string) template.HTML {
	return template.HTML(fmt.Sprintf(`<a class="term" href="/ui/glossary#%s">%s</a>`, anchor(entry), append(text, entry)[0])) // both are written in templates
}

// pressed is a button that does an action, with pairs of fields and values.
type pressed struct {
	User              user
	What, Text, Class string
	pairs             []string
}

// Fields returns the hidden fields.
func (p pressed) Fields() (all [][2]string) {
	for i := 0; i+1 < len(p.pairs); i += 2 {
		all = append(all, [2]string{p.pairs[i], p.pairs[i+1]})
	}
	return all
}

// field is an input of a form, with its help.
type field struct {
	ID, Text, Help, Value string
	Choices               []string // of a list to choose from; nil: the input takes text
}

// contractForm returns the values of the form that changes a topic's contract.
func contractForm(spec *srtmv1.TopicSpec) url.Values {
	c, form := spec.GetContract(), url.Values{}
	form.Set("rate", strconv.FormatFloat(float64(c.GetRateMilli())/1000, 'f', -1, 64))
	form.Set("burst", strconv.FormatInt(c.GetBurst(), 10))
	form.Set("quantile", strconv.FormatFloat(c.GetSlo().GetQuantile(), 'f', -1, 64))
	form.Set("latency", c.GetSlo().GetLatency().AsDuration().String())
	form.Set("over", overLimit(c.GetOverLimit()))
	form.Set("rule", spec.GetShareRule())
	return form
}

// size formats bytes.
func size(n float64) string {
	unit := 0
	for ; n >= 1000 && unit < 4; unit++ {
		n /= 1000
	}
	return strconv.FormatFloat(n, 'g', 3, 64) + " " + []string{"B", "kB", "MB", "GB", "TB"}[unit]
}

// query builds a link from a path and pairs of names and values.
func query(path string, pairs ...string) string {
	q := url.Values{}
	for i := 0; i+1 < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			q.Set(pairs[i], pairs[i+1])
		}
	}
	if len(q) == 0 {
		return path
	}
	return path + "?" + q.Encode()
}

// measured formats a rate in msg/s: whole numbers, or hundredths of a small rate.
func measured(v float64) string {
	if v >= 10 || v <= 0 {
		return thousands(strconv.FormatFloat(v, 'f', 0, 64))
	}
	return strings.TrimRight(strings.TrimRight(strconv.FormatFloat(v, 'f', 2, 64), "0"), ".")
}

// times formats a factor with three digits.
func times(v float64) string {
	if v >= 100 {
		step := math.Pow10(int(math.Floor(math.Log10(v))) - 2)
		return thousands(strconv.FormatFloat(math.Round(v/step)*step, 'f', 0, 64))
	}
	return strconv.FormatFloat(v, 'g', 3, 64)
}

// scheduler says how a gateway's classes share the servers.
func scheduler(kind string) string {
	switch kind {
	case "mqos":
		return "weight, for each resource (mqos)"
	case "none":
		return "order of arrival (none)"
	}
	if resource, ok := strings.CutPrefix(kind, "single:"); ok {
		return "weight, for " + resource + " alone (single)"
	}
	return kind
}

// balance says how a gateway chooses a server.
func balance(kind string) string {
	switch kind {
	case "jbq":
		return "the soonest answer (jbq)"
	case "busy":
		return "the fewest requests (busy)"
	case "rr":
		return "turns (rr)"
	}
	return kind
}

// thousands puts narrow spaces into a number.
func thousands(number string) string {
	whole, fraction, has := strings.Cut(number, ".")
	for i := len(whole) - 3; i > 0 && whole[i-1] != '-'; i -= 3 {
		whole = whole[:i] + "\u202f" + whole[i:]
	}
	if has {
		whole += "." + fraction
	}
	return whole
}
