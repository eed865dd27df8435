package main

import (
	"cmp"
	"crypto/tls"
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"strings"

	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/conn"
	"github.com/srtm-io/srtm/nsqd/metadata"
	"github.com/srtm-io/srtm/tokenbucket"
)

// percentiles adds the fractions of a comma-separated list.
func (o *options) percentiles(list string) error {
	for text := range strings.SplitSeq(list, ",") {
		v, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
		if err != nil || !(v > 0 && v <= 1) {
			return fmt.Errorf("%q is not a fraction in (0, 1]", text)
		}
		o.statsd.Percentiles = append(o.statsd.Percentiles, v)
	}
	return nil
}

// number accepts the values that versions of NSQ have accepted for --worker-id: a number or a boolean.
func number(s string) error {
	_, notBool := strconv.ParseBool(s)
	_, notInt := strconv.ParseInt(s, 10, 64)
	if notBool != nil && notInt != nil {
		return fmt.Errorf("%q is no number", s)
	}
	return nil
}

const topologyAware = "topology-aware-consumption"

// experiment accepts the name of an NSQ experiment that nsqd implements.
func (o *options) experiment(s string) error {
	if o.topologyAware = s == topologyAware; !o.topologyAware {
		return fmt.Errorf("%q is not %s, the only experiment there is", s, topologyAware)
	}
	return nil
}

// tlsRequired says which clients must use TLS. The flag needs no value.
type tlsRequired int

const (
	tlsOptional tlsRequired = iota
	tlsForTCP               // not for HTTP clients
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
	"ssl3.0": tls10, // Go has no SSL 3.0; TLS 1.0 is the lowest version
	"tls1.0": tls10,
	"tls1.1": tls.VersionTLS11,
	"tls1.2": tls.VersionTLS12,
	"tls1.3": tls.VersionTLS13,
}

func (v *tlsVersion) String() string {
	return strings.ToLower(strings.ReplaceAll(tls.VersionName(uint16(cmp.Or(*v, tls10))), " ", ""))
}

// Set takes the name of a version. An empty name leaves the default, as NSQ's example configuration
// file has one.
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

// ioLoops is the number of event loops, or autoLoops.
type ioLoops conn.Config

const (
	autoLoops = "auto"
	maxLoops  = 1024 // each loop has its own memory
)

func (l *ioLoops) String() string {
	if l.MaxLoops > l.Loops {
		return autoLoops
	}
	return strconv.Itoa(l.Loops)
}

// Set takes a number or autoLoops. On systems without event loops autoLoops is 0.
func (l *ioLoops) Set(s string) error {
	n, err := strconv.Atoi(s)
	switch {
	case s == autoLoops && runtime.GOOS == "linux":
		l.Loops, l.MaxLoops = 1, runtime.GOMAXPROCS(0)
		return nil
	case s == autoLoops:
		n = 0
	case err != nil || n < 0:
		return fmt.Errorf("%q is neither a number of event loops nor %s", s, autoLoops)
	}
	l.Loops, l.MaxLoops = n, n
	return nil
}

// topicLimit adds "topic:rate:burst[:delay|reject]", the contract of a topic of a standalone broker.
// The last contract of a topic counts.
func (o *options) topicLimit(s string) error {
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
	if o.broker.Presets == nil {
		o.broker.Presets = map[string]metadata.Contract{}
	}
	o.broker.Presets[topic] = c
	return nil
}
