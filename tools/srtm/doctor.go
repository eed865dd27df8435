package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/mqtt/names"
)

// The outcomes of a check.
const (
	stateOK = "ok"
	warned  = "warning"
	failed  = "failed"
	skipped = "skipped"
)

type finding struct {
	Check string `json:"check"`
	State string `json:"state"`
	Found string `json:"found"`
	Do    string `json:"do,omitempty"` // remedy; empty: nothing to do
}

const (
	doctorPatience = 3 * time.Second // for one answer
	clockLimit     = time.Second     // maximum difference between two hosts' clocks
	certificateDue = 30 * 24 * time.Hour
)

type doctor struct {
	data     []string // folders
	certs    []string // files
	rules    []string // files with MQTT rules
	all      bool     // show also what is ok
	findings []finding
}

func doctorCommand() *cobra.Command {
	var d doctor
	cmd := leaf(&cobra.Command{
		Use:   "doctor",
		Short: "Check this machine and the cluster, and say what to do",
		Long: `doctor checks, on this machine, the kernel, the privileges for arrival stamps by BPF, the
limits of this shell and of the daemons that run, whether its clock is synchronized, who
listens on the ports of SRTM, the space of --data-path, the rules of --mqtt-rules, and the
certificates of --cert and of the --tls flags; and of the cluster, whether the
loaddistributor and the brokers answer, the certificate that the loaddistributor shows, and
by how much the brokers' clocks differ from this one (only differences of more than about
two seconds are seen). It changes nothing.
It shows what is not ok, and with --all or --output json everything.

Exit code: 0, also with warnings; 1 if a check failed.`,
		Example: `  srtm doctor --data-path /var/lib/srtm/nsqd
  srtm doctor --all`,
	}, func(x *call) error {
		d.findings = nil
		d.machine()
		for _, folder := range d.data {
			d.space(folder)
		}
		for _, file := range d.rules {
			d.mqttRules(file)
		}
		for _, file := range append([]string{x.cli.trust.CertFile, strings.TrimPrefix(x.cli.trust.CAFile, "system")}, d.certs...) {
			if file != "" {
				d.certificate(file)
			}
		}
		d.cluster(x)
		bad := 0
		for _, f := range d.findings {
			if f.State == failed {
				bad++
			}
		}
		shown := d.findings
		if !d.all && x.cli.output == formTable {
			shown = slices.DeleteFunc(slices.Clone(shown), func(f finding) bool { return f.State == stateOK || f.State == skipped })
		}
		if hidden := len(d.findings) - len(shown); hidden > 0 {
			defer fmt.Fprintf(x.out, "%s ok or skipped; --all shows all\n", plural.Count(hidden, "check"))
			if len(shown) == 0 {
				return nil
			}
		}
		err := list(x, shown, nil, "CHECK\tSTATE\tFOUND\tWHAT TO DO", func(f finding) []any { return []any{f.Check, f.State, f.Found, f.Do} })
		if err == nil && bad > 0 {
			err = program.ExitError{Code: 1}
		}
		return err
	})
	cmd.Flags().BoolVar(&d.all, "all", false, "show also what is ok")
	cmd.Flags().StringArrayVar(&d.data, "data-path", nil, "`folder` of a daemon whose space is looked at; may be repeated")
	cmd.Flags().StringArrayVar(&d.rules, "mqtt-rules", nil, "TOML `file` with MQTT rules of nsqd that are checked; may be repeated")
	cmd.Flags().StringArrayVar(&d.certs, "cert", nil, "PEM `file` with certificates whose expiry is looked at; may be repeated")
	return cmd
}

func (d *doctor) add(check, state, remedy, problem string, args ...any) {
	if state == stateOK || state == skipped {
		remedy = ""
	}
	d.findings = append(d.findings, finding{check, state, fmt.Sprintf(problem, args...), remedy})
}

// judge rates the remaining lifetime of a certificate.
func judge(left time.Duration) string {
	switch {
	case left <= 0:
		return failed
	case left < certificateDue:
		return warned
	}
	return stateOK
}

func (d *doctor) expiry(check string, c *x509.Certificate) {
	left := time.Until(c.NotAfter)
	verb := "expires"
	if left <= 0 {
		verb = "has expired"
	}
	d.add(check, judge(left), "replace the file with a new one: it is read again while the programs run", "%s %s on %s",
		cmp.Or(c.Subject.CommonName, "a certificate"), verb, c.NotAfter.UTC().Format(time.DateOnly))
}

// certificate checks the certificates of a file.
func (d *doctor) certificate(file string) {
	check := "certificate " + file
	text, err := os.ReadFile(file)
	if err != nil {
		d.add(check, failed, "name a file that can be read", "%v", err)
		return
	}
	n := 0
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		if block.Type != "CERTIFICATE" {
			continue
		}
		n++
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			d.add(check, failed, "replace the file", "%v", err)
			continue
		}
		d.expiry(check, c)
	}
	if n == 0 {
		d.add(check, failed, "name a PEM file with certificates", "none is in it")
	}
}

// mqttRules checks a file with the rules of nsqd's --mqtt-rules.
func (d *doctor) mqttRules(file string) {
	check := "MQTT rules " + file
	text, err := os.ReadFile(file)
	if err != nil {
		d.add(check, failed, "name a file that can be read", "%v", err)
	} else if _, err = names.Parse(text); err != nil {
		d.add(check, failed, "correct the file; nsqd ignores all of a file with a fault, and does not start with one", "%v", err)
	} else {
		d.add(check, stateOK, "", "no faults")
	}
}

// cluster checks the loaddistributor and the brokers.
func (d *doctor) cluster(x *call) {
	ctx, cancel := context.WithTimeout(x.ctx, doctorPatience)
	defer cancel()
	r, err := x.admin.ListBrokers(ctx, &srtmv1.ListBrokersRequest{})
	check := "loaddistributor " + x.cli.address
	if err != nil {
		remedy := "start it, or name another with --loaddistributor-address"
		if c := status.Code(err); c == codes.Unauthenticated || c == codes.PermissionDenied {
			remedy = "name a token with --token-file, or a certificate with --tls-cert"
		}
		d.add(check, failed, remedy, "%v", explain(err))
	} else {
		d.add(check, stateOK, "", "answers; it knows %s", plural.Count(len(r.GetBrokers()), "broker"))
	}
	if x.cli.trust.CAFile != "" {
		for address := range strings.SplitSeq(x.cli.address, ",") {
			d.checkExpiry(ctx, address)
		}
	}
	for _, b := range r.GetBrokers() {
		check := "broker " + b.GetId()
		if !b.GetConnected() {
			d.add(check, failed, "start nsqd there, or look into its log for loaddistributor; srtm broker remove "+b.GetId()+" if it is gone for good", "is not connected to the loaddistributor")
		}
		if r := b.GetRefused(); r != nil {
			d.add(check+" id", failed, "give that nsqd a --broker-id of its own, or stop it", "belongs to nsqd at %s (%s); refused was %s",
				b.GetTcpAddress(), b.GetDataPath(), refusedProcess(r))
		}
		dialer := net.Dialer{Timeout: doctorPatience}
		conn, err := dialer.DialContext(x.ctx, "tcp", b.GetTcpAddress())
		if err != nil {
			d.add(check, failed, "open the port for clients, or set --broadcast-address of that nsqd", "%v", err)
		} else {
			conn.Close()
			d.add(check, stateOK, "", "accepts connections at %s", b.GetTcpAddress())
		}
		if b.GetHttpAddress() != "" {
			d.remote(x.ctx, b)
		}
	}
}

// checkExpiry checks the expiry of a server's certificate. The call before has verified the
// certificate.
func (d *doctor) checkExpiry(ctx context.Context, address string) {
	check := "certificate of " + address
	dialer := tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}}}
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		d.add(check, failed, "look whether the server has --tls-cert", "%v", err)
		return
	}
	defer conn.Close()
	for _, c := range conn.(*tls.Conn).ConnectionState().PeerCertificates[:1] {
		d.expiry(check, c)
	}
}

// remote checks a broker's health and clock over HTTP.
func (d *doctor) remote(ctx context.Context, b *srtmv1.Broker) {
	client := &http.Client{Timeout: doctorPatience}
	defer client.CloseIdleConnections()
	check := "broker " + b.GetId() + " HTTP"
	before := time.Now()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+b.GetHttpAddress()+"/ping", nil)
	if err != nil {
		d.add(check, failed, "set --broadcast-address of that nsqd", "%v", err)
		return
	}
	res, err := client.Do(r)
	if err != nil {
		d.add(check, warned, "open the port to operators; it may take HTTPS only", "%v", err)
		return
	}
	res.Body.Close()
	after := time.Now()
	switch res.StatusCode {
	case http.StatusOK, http.StatusUnauthorized, http.StatusForbidden:
		d.add(check, stateOK, "", "answers at %s", b.GetHttpAddress())
	default:
		d.add(check, failed, "look at /healthz there: it says why", "%s at %s", res.Status, b.GetHttpAddress())
	}
	if at, err := http.ParseTime(res.Header.Get("Date")); err == nil {
		d.clock("broker "+b.GetId()+" clock", at, before, after)
	}
}

// clock compares the Date of an answer, in whole seconds, with the local times before and
// after the request. Only a certain difference is a fault.
func (d *doctor) clock(check string, date, before, after time.Time) {
	offset := time.Duration(0)
	switch {
	case date.After(after):
		offset = date.Sub(after)
	case date.Add(time.Second).Before(before):
		offset = date.Add(time.Second).Sub(before)
	}
	if offset.Abs() > clockLimit {
		d.add(check, warned, "synchronize both hosts' clocks (chrony, systemd-timesyncd): times of seek, retention and logs are each host's", "differs from here by at least %v", offset.Round(time.Millisecond))
		return
	}
	d.add(check, stateOK, "", "differs from here by less than about %v", clockLimit+time.Second)
}
