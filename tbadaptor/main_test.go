package main

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestFaultsAreNamedTogether(t *testing.T) {
	err := new(options).program().Execute(t.Context(), []string{
		"--period=-1s", "--window=0", "--ack-timeout=-1s", "--flex-lease=2h", "--session-lease=1h", "--clock-bound=-1s", "--presume-dead-after=1m", "--flex-percent=101", "--log-format=xml",
	})
	if !errors.As(err, new(program.UsageError)) {
		t.Fatalf("got %v", err)
	}
	for _, part := range []string{
		"--period -1s: want 1ms to 1h", "--window 0s: want 1ms to 1h", "--ack-timeout -1s: want 1ms to 1h", "--session-lease 1h0m0s is shorter than --flex-lease 2h0m0s",
		"--clock-bound -1s", "--presume-dead-after 1m0s", "--flex-percent 101", "xml",
	} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%v\ndoes not say %q", err, part)
		}
	}
	var o options
	if _, _, err := o.program().Parse(nil, io.Discard); err != nil || o.addresses.GRPC != "127.0.0.1:4180" || o.addresses.HTTP != "127.0.0.1:4181" {
		t.Errorf("the defaults: %+v, %v", o, err)
	}
}

func TestTheDaemonServesUntilItIsStopped(t *testing.T) {
	rpcAddress, webAddress := testkit.Address(t), testkit.Address(t)
	testkit.Run(t, func(ctx context.Context) error {
		return new(options).program().Execute(ctx, []string{"--grpc-address", rpcAddress, "--http-address", webAddress, "--log-level=error"})
	})
	conn := testkit.Result(grpc.NewClient(rpcAddress, grpc.WithTransportCredentials(insecure.NewCredentials()))).Must(t)
	defer conn.Close()
	limit, cancel := context.WithTimeout(t.Context(), testkit.Hang)
	defer cancel()
	grants := srtmv1.NewGrantServiceClient(conn)
	client := &http.Client{Timeout: testkit.Hang, Transport: &http.Transport{DisableKeepAlives: true}}
	testkit.WaitFor(t, "health", func() bool {
		r, err := client.Get("http://" + webAddress + "/healthz")
		if err != nil {
			return false
		}
		defer r.Body.Close()
		body, _ := io.ReadAll(r.Body)
		return r.StatusCode == http.StatusOK && strings.HasPrefix(string(body), "ok\nno loaddistributor has asked this adaptor to act")
	})
	response, err := grants.Lead(limit, &srtmv1.LeadRequest{}, grpc.WaitForReady(true))
	testkit.Must(t, err)
	if _, err := grants.ListShares(limit, &srtmv1.ListSharesRequest{}); status.Code(err) != codes.Unavailable {
		t.Errorf("it was not asked to act: %v", err)
	}
	_, err = grants.Lead(limit, &srtmv1.LeadRequest{Instance: response.Instance, Stamp: response.Stamp, Lease: durationpb.New(time.Hour), Term: 1})
	testkit.Must(t, err)
	_, err = grants.ListShares(limit, &srtmv1.ListSharesRequest{})
	testkit.Must(t, err)
	for path, want := range map[string]string{"/healthz": "ok", "/metrics": "srtm_tbadaptor_sessions 0", "/debug/state": `"topics"`} {
		r := testkit.Result(client.Get("http://" + webAddress + path)).Must(t)
		body, err := io.ReadAll(r.Body)
		r.Body.Close()
		if err != nil || r.StatusCode != http.StatusOK || !strings.Contains(string(body), want) {
			t.Errorf("%s: %d %.200s %v, want %q in it", path, r.StatusCode, body, err, want)
		}
	}
}
