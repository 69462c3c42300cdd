package cli

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/node"
	"github.com/fairlead/fairlead/internal/testbed"
)

// An agent takes what its server says, and rejects flags that differ by name and both
// values.
func TestAgentTakesTheServersRanges(t *testing.T) {
	prefixes := func(list ...string) (out []netip.Prefix) {
		for _, p := range list {
			out = append(out, netip.MustParsePrefix(p))
		}
		return out
	}
	server := join.Cluster{
		PodCIDRs: prefixes("10.1.0.0/16", "fd00:1::/56"), ServiceCIDRs: prefixes("10.2.0.0/16"),
		DNS: []netip.Addr{netip.MustParseAddr("10.2.0.10")}, Domains: []string{"corp.test"},
	}
	for _, x := range []struct {
		want string // in the error, or else the ranges
		args []string
	}{
		{"10.1.0.0/16,fd00:1::/56 10.2.0.0/16 [corp.test] [10.2.0.10]", nil},
		{"10.1.0.0/16,fd00:1::/56 10.2.0.0/16 [corp.test] [10.2.0.10]",
			[]string{"--cluster-cidr=fd00:1::/56,10.1.2.3/16", "--cluster-domain=corp.test"}},
		{"--cluster-cidr is 10.9.0.0/16, but the server has 10.1.0.0/16,fd00:1::/56", []string{"--cluster-cidr=10.9.0.0/16"}},
		{"--service-cluster-ip-range is 10.9.0.0/16, but the server has 10.2.0.0/16", []string{"--service-cluster-ip-range=10.9.0.0/16"}},
		{"--cluster-domain is other.test, but the server has corp.test", []string{"--cluster-domain=other.test"}},
	} {
		var f node.Flags
		cmd := &cobra.Command{}
		f.Add(cmd)
		f.Networks = node.DefaultNetworks()
		f.Networks.AddNetworks(cmd, "", "")
		if err := cmd.ParseFlags(append(x.args, "--node-name=n")); err != nil {
			t.Fatal(err)
		}
		err := f.Use(server, func(flag string) bool { return cmd.Flags().Changed(flag) })
		var got string
		if err != nil {
			got = err.Error()
		} else {
			dns, err := f.Networks.ClusterDNS()
			if err != nil {
				t.Fatal(err)
			}
			got = f.Networks.PodCIDRs.String() + " " + f.Networks.ServiceCIDRs.String() +
				" [" + strings.Join(f.DNS.Domains, ",") + "] [" + base.ListOf(dns) + "]"
		}
		if !strings.HasPrefix(got, x.want) {
			t.Errorf("%s: %q, want %q", x.args, got, x.want)
		}
	}
}

// An agent with static Pods and no server in reach begins with what that had said last;
// one without waits for the server.
func TestAgentWithStaticPodsNeedsNoServer(t *testing.T) {
	dir := t.TempDir()
	begin := func(manifests string) (*node.Flags, error) {
		var f node.Flags
		cmd := &cobra.Command{}
		f.Add(cmd)
		f.Networks = node.DefaultNetworks()
		f.Networks.AddNetworks(cmd, "", "")
		if err := cmd.ParseFlags([]string{"--node-name=n", "--pod-manifest-dir=" + manifests}); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if manifests == dir {
			ctx = t.Context()
		}
		return &f, f.Adopt(ctx, node.Adoption{
			Log: slog.New(slog.DiscardHandler), Config: &rest.Config{Host: "127.0.0.1:1"}, StateDir: filepath.Join(dir, "agent"),
			Given: cmd.Flags().Changed, LaterWait: 100 * time.Millisecond,
		})
	}
	if err := node.RecordCluster(filepath.Join(dir, "agent"), join.Cluster{
		PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}, Domains: []string{"corp.test"},
	}); err != nil {
		t.Fatal(err)
	}
	if _, err := begin(filepath.Join(dir, "none")); err == nil {
		t.Error("an agent without static Pods begins without a server")
	}
	f, err := begin(dir) // which has a file
	if err != nil || f.Networks.PodCIDRs.String() != "10.1.0.0/16" || f.DNS.Domains[0] != "corp.test" {
		t.Errorf("ranges %s, domains %v, %v", f.Networks.PodCIDRs.String(), f.DNS.Domains, err)
	}
}

// waitLog is a log.
type waitLog struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *waitLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *waitLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// An agent that has run before waits for its server as long as it takes, and says so; at the
// first start it ends with what to do.
func TestAgentWaitsForItsServer(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	host := l.Addr().String()
	_ = l.Close()
	var log waitLog
	begin := func(dir string) error {
		var f node.Flags
		cmd := &cobra.Command{}
		f.Add(cmd)
		f.Networks = node.DefaultNetworks()
		f.Networks.AddNetworks(cmd, "", "")
		if err := cmd.ParseFlags([]string{"--node-name=n", "--pod-manifest-dir=" + filepath.Join(dir, "none")}); err != nil {
			t.Fatal(err)
		}
		return f.Adopt(t.Context(), node.Adoption{
			Log: slog.New(slog.NewTextHandler(&log, nil)), Config: &rest.Config{Host: "http://" + host}, StateDir: filepath.Join(dir, "agent"),
			Given: cmd.Flags().Changed, FirstWait: 100 * time.Millisecond, LaterWait: time.Millisecond,
		})
	}
	if err := begin(t.TempDir()); err == nil || !strings.Contains(err.Error(), "this node has not run before") {
		t.Errorf("at the first start: %v", err)
	}
	again := t.TempDir()
	state := filepath.Join(again, "agent")
	if err := os.Mkdir(state, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := begin(again); err == nil || !strings.Contains(err.Error(), "this node has not run before") {
		t.Errorf("after a first start that failed: %v", err)
	}
	if err := node.RecordCluster(state, join.Cluster{}); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- begin(again) }()
	testbed.Until(t, "the log to say that it waits", func() error {
		if text := log.String(); strings.Count(text, "cannot reach the server") < 2 {
			return errors.New(text)
		}
		return nil
	})
	select {
	case err := <-ended:
		t.Fatalf("it has ended: %v", err)
	default:
	}
	if l, err = net.Listen("tcp", host); err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.NotFoundHandler(), ReadHeaderTimeout: time.Minute} // that publishes nothing
	go func() { _ = server.Serve(l) }()
	defer server.Close()
	if err := <-ended; err != nil {
		t.Errorf("with a server: %v", err)
	}
}

// Without root the machine's own static Pods are left alone, unless their directory is asked for.
func TestStaticPodsWithoutRoot(t *testing.T) {
	for _, x := range []struct {
		args []string
		want string
	}{
		{nil, ""},
		{[]string{"--pod-manifest-dir=" + node.DefaultManifestDir}, node.DefaultManifestDir},
		{[]string{"--pod-manifest-dir=/srv/pods"}, "/srv/pods"},
	} {
		var f node.Flags
		cmd := &cobra.Command{}
		f.Add(cmd)
		if err := cmd.ParseFlags(x.args); err != nil {
			t.Fatal(err)
		}
		if f.InNamespace(cmd.Flags().Changed); f.Pods.ManifestDir != x.want {
			t.Errorf("%s: %q, want %q", x.args, f.Pods.ManifestDir, x.want)
		}
	}
}
