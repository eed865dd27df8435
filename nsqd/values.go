package main

import (
	"cmp"
	"crypto/tls"
	"fmt"
	"strconv"
	"strings"
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
