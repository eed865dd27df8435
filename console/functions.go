package console

import (
	"fmt"
	"html/template"
	"net/url"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/srtm-io/srtm/console/why"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/topics"
)

// functions are the functions of templates.
var functions = template.FuncMap{
	"count":      func(v any) string { return thousands(fmt.Sprint(v)) },
	"rate":       func(v float64) string { return thousands(strconv.FormatFloat(v, 'f', -1, 64)) },
	"measured":   func(v float32) string { return measured(float64(v)) },
	"measured32": measured,
	"milli":      func(v int64) string { return thousands(strconv.FormatFloat(float64(v)/1000, 'f', -1, 64)) },
	"ms":         func(v float32) string { return why.Duration(time.Duration(float64(v) * 1e6)) },
	"duration":   why.Duration,
	"p99":        func(l *obs.Latency) string { return why.Duration(l.Quantile(0.99)) },
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
	"button": func(user user, d channelData, what, text, confirm string) pressed {
		return pressed{user, d, what, text, confirm}
	},
	"query": query,
}

// term links a word to the glossary.
func term(word string) template.HTML {
	return template.HTML(fmt.Sprintf(`<a class="term" href="/ui/glossary#%s">%[1]s</a>`, template.HTMLEscapeString(word)))
}

// pressed is a button of a channel.
type pressed struct {
	User                user
	Channel             channelData
	What, Text, Confirm string
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

