package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/textproto"
	"net/url"
	"strings"

	"github.com/srtm-io/srtm/internal/daemon"
	"github.com/srtm-io/srtm/internal/lifecycle"
)

// command runs the gateway, or what its first argument names.
func command(ctx context.Context, args []string, out io.Writer) error {
	o := &options{}
	p := o.program()
	if len(args) == 0 || strings.HasPrefix(args[0], "-") {
		return p.Execute(ctx, args)
	}
	switch args[0] {
	case "check":
		p = o.check(out)
	case "explain":
		// The URL may be the last argument, as people write it.
		if last := args[len(args)-1]; len(args) > 1 && !strings.HasPrefix(last, "-") && strings.ContainsAny(last, "/?") {
			args = append(args[:len(args)-1:len(args)-1], "--url="+last)
		}
		p = o.explain(out)
	default:
		return lifecycle.UsageError{Err: fmt.Errorf("%q: want check, explain, profile or monitor, or flags alone", args[0])}
	}
	p.Name = "gateway " + args[0]
	return p.Execute(ctx, args[1:])
}

func (o *options) policyFlag(fs *flag.FlagSet) {
	fs.StringVar(&o.policyFile, "policy", "", "TOML `file` of classes, servers and costs")
}

// check says whether a policy is sound.
func (o *options) check(out io.Writer) *daemon.Program {
	return &daemon.Program{
		About: "gateway check says what is wrong with a policy.", Flags: o.policyFlag, Validate: o.readPolicy,
		Run: func(context.Context, *slog.Logger, *slog.LevelVar) error {
			p := o.proxy.Policy
			for _, warning := range p.Warnings {
				fmt.Fprintln(out, "warning:", warning)
			}
			_, err := fmt.Fprintf(out, "%d classes, %d servers, %d resources\n", len(p.Classes), len(p.Servers), len(p.Resources))
			return err
		},
	}
}

// explain says what the gateway would make of a request.
func (o *options) explain(out io.Writer) *daemon.Program {
	var tenant, target string
	header := http.Header{}
	flags := func(fs *flag.FlagSet) {
		o.policyFlag(fs)
		fs.StringVar(&target, "url", "", "`URL` or path that is asked for; also the last argument")
		fs.StringVar(&tenant, "tenant", "", "`tenant` that asks")
		fs.Func("header", "`\"Name: value\"` of the request; may be repeated", func(s string) error {
			name, value, ok := strings.Cut(s, ":")
			if !ok {
				return errors.New(`want "Name: value"`)
			}
			name = textproto.CanonicalMIMEHeaderKey(strings.TrimSpace(name))
			header[name] = append(header[name], strings.TrimSpace(value))
			return nil
		})
	}
	validate := func() error {
		if target == "" {
			return errors.Join(o.readPolicy(), errors.New("want the URL to explain"))
		}
		return o.readPolicy()
	}
	run := func(context.Context, *slog.Logger, *slog.LevelVar) error {
		u, err := url.Parse(target)
		if err != nil {
			return err
		}
		p := o.proxy.Policy
		i, rule := p.Classify(tenant, u.Path, header)
		c := p.Classes[i]
		fmt.Fprintf(out, "class      %s, weight %d: %s\n", c.Name, c.Weight, rule)
		fmt.Fprintf(out, "waits      with at most %d others, %v at most\n", c.Queue, c.Wait)
		if key := c.AdmissionKey(tenant); key != "" {
			failure := "refused"
			if c.FailOpen {
				failure = "admitted"
			}
			fmt.Fprintf(out, "admission  %s; %s where it cannot be asked\n", key, failure)
		}
		if units := p.CostOf(u.Path); units == nil {
			fmt.Fprintln(out, "cost       learned")
		} else {
			for k, name := range p.Resources {
				fmt.Fprintf(out, "cost       %g of %s\n", units[k], name)
			}
		}
		return nil
	}
	return &daemon.Program{About: "gateway explain says of what class a request would be, why, and what it is taken to cost.", Flags: flags, Validate: validate, Run: run}
}
