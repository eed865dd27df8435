package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/srtm-io/srtm/admission/server"
	"github.com/srtm-io/srtm/admission/store"
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

func stateOf(t *testing.T, web string) (s server.State) {
	t.Helper()
	_, text, _ := strings.Cut(get(t, web+"/debug/state", ""), " ")
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		t.Fatal(err)
	}
	return s
}

// A server replicates to another one with TLS, by certificates. Who shows none, or one that
// is not of the servers' authority or no longer valid, can neither write nor read what the
// follower knows, nor end its word; the same calls with a certificate do all of that.
func TestReplicationTakesACertificate(t *testing.T) {
	t.Parallel()
	authority, data := testkit.NewAuthority(t), t.TempDir()
	daemon := func(name string) (web, rpc string) {
		web, rpc = testkit.Address(t), testkit.Address(t)
		host, _, _ := net.SplitHostPort(rpc)
		c := authority.Certificate(name, net.ParseIP(host))
		run(t, "--data-path="+data, "--udp-address=127.0.0.1:0", "--checkpoint=1m", "--http-address="+web,
			"--grpc-address="+rpc, "--tls-cert="+c.CertFile, "--tls-key="+c.KeyFile, "--tls-client-ca="+authority.File,
			"--peer-tls-ca="+authority.File, "--peer-tls-cert="+c.CertFile, "--peer-tls-key="+c.KeyFile)
		localtest.WaitFor(t, name, func() bool {
			_, code, err := localtest.Ask("GET", "http://"+web+"/healthz", "")
			return err == nil && code == 200
		})
		return web, rpc
	}
	owner, _ := daemon("owner")
	localtest.WaitFor(t, "the owner owns all", func() bool { return stateOf(t, owner).Partitions == 4096 })
	_, rpc := daemon("follower")
	dial := func(c secure.ClientConfig) (srtmv1.AdmissionReplicationClient, srtmv1.AdmissionAdminClient) {
		options, err := c.Load("")
		if err != nil {
			t.Fatal(err)
		}
		conn, err := grpc.NewClient(rpc, options...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return srtmv1.NewAdmissionReplicationClient(conn), srtmv1.NewAdmissionAdminClient(conn)
	}
	as := func(c testkit.Certificate) secure.ClientConfig {
		return secure.ClientConfig{CAFile: authority.File, CertFile: c.CertFile, KeyFile: c.KeyFile}
	}
	peer, admin := dial(as(authority.Certificate("peer")))
	if _, err := admin.SetRules(t.Context(), &srtmv1.SetRulesRequest{Rules: []*srtmv1.AdmissionRule{{Key: "k", RefillMilli: 1, Capacity: 10}}}); err != nil {
		t.Fatal(err)
	}
	localtest.WaitFor(t, "the follower", func() bool { return stateOf(t, owner).Follower != "" })
	if got := get(t, owner+"/qos?key=k&cost=7", ""); got != `200 TRUE "default";r=3` {
		t.Fatal(got)
	}
	admitted := clock.Mono()
	localtest.WaitFor(t, "replication", func() bool {
		since := clock.Mono().Sub(admitted) // read before Lag is: what was sent last began later
		return stateOf(t, owner).Lag < since.Seconds()
	})

	db, err := store.Open(t.Context(), filepath.Join(data, "admission.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	members, err := db.Members(t.Context())
	if err != nil || len(members) != 2 {
		t.Fatal(members, err)
	}
	from, to := members[0], members[1]
	if from.Follower != to.Instance || to.Replicate != rpc {
		from, to = to, from
	}
	replicate := func(as srtmv1.AdmissionReplicationClient, key string) error {
		_, err := as.Replicate(t.Context(), &srtmv1.ReplicateRequest{Owner: from.Instance, Follower: to.Instance, Credits: []*srtmv1.AdmissionCredit{
			{Key: key, CreditMilli: 9000, Epoch: 1, AtMs: 1 << 42}, // which is newer than the owner's
		}})
		return err
	}
	known := func(as srtmv1.AdmissionReplicationClient) (map[string]int64, error) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		credits := map[string]int64{}
		stream, err := as.Recover(ctx, &srtmv1.RecoverRequest{Owner: from.Instance, Follower: to.Instance})
		for err == nil {
			var some *srtmv1.RecoverResponse
			some, err = stream.Recv()
			for _, c := range some.GetCredits() {
				credits[c.GetKey()] = c.GetCreditMilli() / 1000
			}
		}
		if errors.Is(err, io.EOF) {
			err = nil
		}
		return credits, err
	}

	for name, c := range map[string]secure.ClientConfig{
		"in clear":                {},
		"without a certificate":   {CAFile: authority.File},
		"of another authority":    as(testkit.NewAuthority(t).Certificate("peer")),
		"that is no longer valid": as(authority.Expired("expired")),
	} {
		stranger, _ := dial(c)
		if err := replicate(stranger, "k"); status.Code(err) != codes.Unavailable {
			t.Errorf("%s: replicate: %v", name, err)
		}
		if credits, err := known(stranger); status.Code(err) != codes.Unavailable || len(credits) > 0 {
			t.Errorf("%s: recover: %v, %v", name, credits, err)
		}
	}
	// Its word has not ended: to one whose has ended nothing can be replicated.
	if err := replicate(peer, "other"); err != nil {
		t.Errorf("a peer: %v", err)
	}
	credits, err := known(peer)
	if err != nil || len(credits) != 2 || credits["k"] != 3 || credits["other"] != 9 {
		t.Errorf("the follower knows %v, %v; the owner has replicated 3 of k, and a peer 9 of other", credits, err)
	}
	if err := replicate(peer, "k"); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("after the word has ended: %v", err)
	}
}
