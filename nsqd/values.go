package main

import (
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"strconv"
	"strings"

	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/metadata"
	"github.com/srtm-io/srtm/tokenbucket"
)

// list is a flag that may be repeated.
type list []string

func (l *list) String() string { return strings.Join(*l, ",") }

// Set adds one.
func (l *list) Set(s string) error {
	if s == "" {
		return errors.New("empty")
	}
	*l = append(*l, s)
	return nil
}

// quantiles are fractions in (0, 1], a flag that may be repeated and take a
// list.
type quantiles []float64

func (q *quantiles) String() string {
	var all []string
	for _, v := range *q {
		all = append(all, strconv.FormatFloat(v, 'g', -1, 64))
	}
	return strings.Join(all, ",")
}

// Set adds one or more, separated by commas.
func (q *quantiles) Set(s string) error {
	var all []float64
	for text := range strings.SplitSeq(s, ",") {
		v, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
		if err != nil || !(v > 0 && v <= 1) {
			return fmt.Errorf("%q is not a fraction in (0, 1]", text)
		}
		all = append(all, v)
	}
	*q = append(*q, all...)
	return nil
}

// workerID takes what NSQ's flag of that name took over time: a number, and no
// value.
type workerID struct{}

func (workerID) String() string { return "false" }

// IsBoolFlag lets the flag stand alone.
func (workerID) IsBoolFlag() bool { return true }

// Set takes a boolean or a number.
func (workerID) Set(s string) error {
	_, notBool := strconv.ParseBool(s)
	_, notInt := strconv.ParseInt(s, 10, 64)
	if notBool != nil && notInt != nil {
		return fmt.Errorf("%q is no number", s)
	}
	return nil
}

// experiments are those of NSQ that are taken part in, a flag that may be
// repeated.
type experiments struct{ topology bool }

const topologyAware = "topology-aware-consumption"

func (e *experiments) String() string {
	if e.topology {
		return topologyAware
	}
	return ""
}

// Set takes an experiment's name.
func (e *experiments) Set(s string) error {
	if s != topologyAware {
		return fmt.Errorf("%q is not %s, the only experiment there is", s, topologyAware)
	}
	e.topology = true
	return nil
}

// alias adds a second name to a flag, as NSQ's configuration files have it.
func alias(fs *flag.FlagSet, name, other string) {
	fs.Var(fs.Lookup(name).Value, other, "as --"+name+", which has this name in NSQ's configuration files")
}

// logLevel is the least severe level that is logged. NSQ has one more than
// slog: at fatal nothing is logged, since what ends the daemon is printed anyway.
type logLevel slog.Level

const logNothing = logLevel(slog.LevelError + 4)

// logLevels in the order of NSQ's numbers, which begin with 1.
var logLevels = [...]struct {
	name  string
	level logLevel
}{
	{"debug", logLevel(slog.LevelDebug)},
	{"info", logLevel(slog.LevelInfo)},
	{"warn", logLevel(slog.LevelWarn)},
	{"error", logLevel(slog.LevelError)},
	{"fatal", logNothing},
}

func (l *logLevel) String() string {
	for _, known := range logLevels {
		if known.level == *l {
			return known.name
		}
	}
	return slog.Level(*l).String()
}

// Set takes a level's name.
func (l *logLevel) Set(s string) error {
	for _, known := range logLevels {
		if strings.EqualFold(known.name, s) {
			*l = known.level
			return nil
		}
	}
	return fmt.Errorf("%q is none of debug, info, warn, error, fatal", s)
}

// number is the level as NSQ's HTTP API gives it.
func (l logLevel) number() int {
	for i, known := range logLevels {
		if known.level == l {
			return i + 1
		}
	}
	return 0
}

// tlsRequired is whom TLS is required of, a flag that may stand without a
// value.
type tlsRequired int

const (
	tlsOptional tlsRequired = iota
	tlsForTCP               // and not of HTTP clients
	tlsForAll
)

func (t *tlsRequired) String() string {
	return [...]string{tlsOptional: "false", tlsForTCP: "tcp-https", tlsForAll: "true"}[*t]
}

// IsBoolFlag makes the flag alone mean true.
func (t *tlsRequired) IsBoolFlag() bool { return true }

// Set takes a boolean or tcp-https.
func (t *tlsRequired) Set(s string) error {
	if strings.EqualFold(s, "tcp-https") {
		*t = tlsForTCP
		return nil
	}
	required, err := strconv.ParseBool(s)
	if err != nil {
		return fmt.Errorf("%q is none of true, false, tcp-https", s)
	}
	*t = tlsOptional
	if required {
		*t = tlsForAll
	}
	return nil
}

// tlsVersion is a version of TLS.
type tlsVersion uint16

const tls10 tlsVersion = tls.VersionTLS10

var tlsVersions = map[string]tlsVersion{
	"ssl3.0": tls10, // nothing speaks it any more, so this is the least there is
	"tls1.0": tls10,
	"tls1.1": tls.VersionTLS11,
	"tls1.2": tls.VersionTLS12,
	"tls1.3": tls.VersionTLS13,
}

func (v *tlsVersion) String() string {
	switch *v {
	case tls.VersionTLS11:
		return "tls1.1"
	case tls.VersionTLS12:
		return "tls1.2"
	case tls.VersionTLS13:
		return "tls1.3"
	}
	return "tls1.0"
}

// Set takes a version's name; an empty one, as in NSQ's example of a
// configuration file, leaves the default.
func (v *tlsVersion) Set(s string) error {
	if s == "" {
		return nil
	}
	version, ok := tlsVersions[strings.ToLower(s)]
	if !ok {
		return fmt.Errorf("%q is none of tls1.0, tls1.1, tls1.2, tls1.3", s)
	}
	*v = version
	return nil
}

// topicLimits are the contracts of a standalone broker's topics, a flag that may be
// repeated; for a topic that is named twice the last one counts.
type topicLimits map[string]metadata.Contract

func (t *topicLimits) String() string { return "" }

// Set adds "topic:rate:burst[:delay|reject]".
func (t *topicLimits) Set(s string) error {
	parts := strings.Split(s, ":")
	if len(parts) != 3 && len(parts) != 4 {
		return errors.New("want topic:rate:burst or topic:rate:burst:policy")
	}
	topic := parts[0]
	if !wire.ValidTopicName(topic) {
		return fmt.Errorf("topic %q is not a valid name", topic)
	}
	rate, err := strconv.ParseFloat(parts[1], 64)
	if err != nil {
		return fmt.Errorf("rate %q is not a number of messages per second", parts[1])
	}
	c := metadata.Contract{RateMilli: int64(tokenbucket.PerSecond(rate))}
	if c.Burst, err = strconv.ParseInt(parts[2], 10, 64); err != nil {
		return fmt.Errorf("burst %q is not a number of messages", parts[2])
	}
	if err := c.Share().Validate(); err != nil {
		return err
	}
	if c.Share().IsZero() {
		return errors.New("a rate and a burst of 0 would stop the topic")
	}
	if len(parts) == 4 {
		switch parts[3] {
		case "delay":
		case "reject":
			c.Reject = true
		default:
			return fmt.Errorf("policy %q is neither delay nor reject", parts[3])
		}
	}
	if *t == nil {
		*t = topicLimits{}
	}
	(*t)[topic] = c
	return nil
}
