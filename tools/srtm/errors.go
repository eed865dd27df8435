package main

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tools/srtm/plan"
)

// callError is an error of a call, with the parts of the command line that explain needs.
type callError struct {
	error
	address, addressFlag string
	file                 bool // the request is from --file, so its fields are known to the user
}

func (c *callError) Unwrap() error { return c.error }

// meanings explain library errors to an operator, by a part of the error text. Each says
// what is at the address, and what to do.
var meanings = []struct{ part, explanation string }{
	{"connection refused", "nothing listens there; start it, or name another address"},
	{"no such host", "the name has no address; check the spelling"},
	{"looked like an HTTP/1.1 header", "an HTTP server answers there; name the gRPC port, by default 4170 (loaddistributor) or 4192 (admission)"},
	{"is not a settings frame", "no gRPC server answers there; name the gRPC port, by default 4170 (loaddistributor) or 4192 (admission)"},
	{"frame too large", "no gRPC server answers there; name the gRPC port, by default 4170 (loaddistributor) or 4192 (admission)"},
	{"size 1213486160", "an HTTP server answers there; name the broker's TCP port, by default 4150"}, // "HTTP" as a size
	{"malformed HTTP response", "no HTTP server answers there; name the broker's HTTP port, by default 4151"},
	{"it may take TLS", "the server ended the connection; it may take TLS (--tls-ca), or be another program"},
	{"first record does not look like a TLS handshake", "the server speaks no TLS there; leave --tls-ca out, or name another port"},
	{"certificate signed by unknown authority", "its certificate is of another authority; name the authority's file with --tls-ca"},
	{"i/o timeout", "no answer; a firewall may drop the packets"},
}

// meaning returns the explanation of an error text, or "".
func meaning(text string) string {
	for _, m := range meanings {
		if strings.Contains(text, m.part) {
			return m.explanation
		}
	}
	return ""
}

// explain turns an error into a text for an operator: what failed, why, and what to do.
// It names the faults of a request by the flags that set the fields.
func explain(err error) error {
	if err == nil {
		return nil
	}
	var remote interface{ GRPCStatus() *status.Status }
	if !errors.As(err, &remote) {
		if explanation := meaning(err.Error()); explanation != "" && !errors.As(err, new(program.UsageError)) {
			return fmt.Errorf("%w: %s", err, explanation)
		}
		return err
	}
	var call *callError
	if !errors.As(err, &call) {
		call = &callError{address: "the server", addressFlag: "loaddistributor-address"}
	}
	s := remote.GRPCStatus()
	switch s.Code() {
	case codes.Unavailable:
		if explanation := meaning(s.Message()); explanation != "" {
			return fmt.Errorf("cannot connect to %s: %s (--%s)", call.address, explanation, call.addressFlag)
		}
		if _, dial, is := strings.Cut(s.Message(), "Error while dialing: "); is { // drop gRPC's prefix
			return fmt.Errorf("cannot connect to %s: %s (--%s)", call.address, strings.TrimSuffix(dial, `"`), call.addressFlag)
		}
		return fmt.Errorf("request failed: %s", s.Message())
	case codes.Unimplemented:
		return fmt.Errorf("the server at %s does not offer this; is another program there (--%s)? %s", call.address, call.addressFlag, s.Message())
	case codes.DeadlineExceeded:
		if explanation := meaning(s.Message()); explanation != "" {
			return fmt.Errorf("cannot connect to %s: %s (--%s)", call.address, explanation, call.addressFlag)
		}
		return fmt.Errorf("no answer from %s in time (--timeout): %s", call.address, s.Message())
	case codes.Unauthenticated:
		return fmt.Errorf("%s; show a token with --token-file, or a certificate with --tls-cert and --tls-key", s.Message())
	}
	var faults []error
	for _, d := range s.Details() {
		switch d := d.(type) {
		case *errdetails.BadRequest:
			for _, v := range d.GetFieldViolations() {
				field := v.GetField()
				if !call.file {
					field = flagOf(field)
				}
				faults = append(faults, fmt.Errorf("%s: %s", field, v.GetDescription()))
			}
		case *srtmv1.Infeasible:
			return program.ExitError{Code: plan.CodeInfeasible, Err: infeasible(d)}
		}
	}
	if len(faults) > 0 {
		return errors.Join(faults...)
	}
	return errors.New(s.Message())
}

// infeasible formats why a topic does not fit, and which changes would make it fit.
func infeasible(p *srtmv1.Infeasible) error {
	f := p.GetFits()
	err := &placement.Infeasible{Bound: p.GetBound(), Need: p.GetNeed(), Have: p.GetHave(), Fits: placement.Fits{
		Rate: f.GetRate(), Burst: f.GetBurst(), Publishers: f.GetPublishers(), MoreBrokers: f.GetMoreBrokers(), Mcap: f.GetBrokerMcap(),
	}}
	if p.GetBound() == "brokers" && p.GetHave() == 0 {
		return fmt.Errorf("%w that could carry it; start nsqd with --loaddistributor-address (srtm broker list shows the brokers)", err)
	}
	return err
}

// fieldFlags maps request fields to flags, in addition to fieldOf.
var fieldFlags = map[string]string{
	"publisher_ids": "--publisher-id", "broker_id": "the broker", "from_broker_id": "--from", "expected_epoch": "--epoch",
	"idempotency_key": "--idempotency-key", "spec.durability": "--durability", "spec.name": "the topic's name", "name": "the topic's name",
	"topic": "the topic's name", "channel": "the channel's name", "to": "--to", "to.time": "--to", "mcap": "--mcap", "spec.contract": "--rate and --burst",
	"spec.auto": "--auto-rate-limit and --auto-burst", "spec.auto.max_rate_milli": "--auto-rate-limit", "spec.auto.max_burst": "--auto-burst",
}

// listed matches a field of a list element.
var listed = regexp.MustCompile(`^spec\.(group|publisher|channel)s\[([0-9]+)\](?:\.(.*))?$`)

// flagOf returns the flag that sets a field of a request, or else the field.
func flagOf(field string) string {
	if flag := fieldFlags[field]; flag != "" {
		return flag
	}
	for flag, of := range fieldOf {
		if "spec."+of == field && of != "auto" {
			return "--" + flag
		}
	}
	if m := listed.FindStringSubmatch(field); m != nil {
		i, _ := strconv.Atoi(m[2]) // digits
		text := fmt.Sprintf("--%s, number %d", m[1], i+1)
		if m[3] != "" {
			text += ", " + strings.ReplaceAll(m[3], "_", " ")
		}
		return text
	}
	return field
}
