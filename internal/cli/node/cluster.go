package node

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// clusterRetry is the time between two attempts to read the server's ranges.
const clusterRetry = 250 * time.Millisecond

// Adoption is how a node takes the cluster's ranges and domains from its server.
type Adoption struct {
	Log      *slog.Logger
	Config   *rest.Config
	StateDir string
	// Given reports whether a flag was set.
	Given func(flag string) bool
	// FirstWait bounds the wait for the server at a node's first start, at which an operator sees the
	// error; 0 for a minute.
	FirstWait time.Duration
	// LaterWait is how long an agent with static Pods waits for the server before it begins with the
	// last known ranges, and how long another one that has run before waits until it logs that; 0 for
	// ten seconds.
	LaterWait time.Duration
}

// The defaults of Adoption, and the longest time between two lines of the log about a server that
// cannot be reached.
const (
	firstWait      = time.Minute
	laterWait      = 10 * time.Second
	maxClusterWait = 5 * time.Minute
)

// Adopt takes the cluster's ranges and domains from the server, and rejects flags that
// differ: a node with others would answer for the wrong addresses. A server that
// publishes none leaves the flags as they are.
func (f *Flags) Adopt(ctx context.Context, a Adoption) error {
	c, err := f.cluster(ctx, a)
	switch {
	case apierrors.IsNotFound(err) || apierrors.IsForbidden(err):
		a.Log.Info("the server does not publish the cluster's ranges and domains; using the flags", "reason", err)
		return nil
	case apierrors.IsUnauthorized(err):
		return fmt.Errorf("%w: the server does not accept the credentials of this node: the cluster's authority was replaced while this node "+
			"was off, or its certificate has expired; delete the Node and join again with a token (--token-file)", err)
	case unreachable(ctx, err):
		return fmt.Errorf("%w; this node has not run before, and needs the server for its first start: "+
			"check that the server runs and that this machine reaches it, and start the agent again", err)
	case err != nil:
		return err
	}
	if err := RecordCluster(a.StateDir, c); err != nil {
		a.Log.Warn("cannot record the cluster's ranges; static Pods will wait for the server after a restart", "err", err)
	}
	return f.Use(c, a.Given)
}

// cluster reads what the server publishes. A node that has run before waits for the server as long
// as it takes, or with static Pods goes on with what the server published before.
func (f *Flags) cluster(ctx context.Context, a Adoption) (join.Cluster, error) {
	client, err := kubernetes.NewForConfig(base.AgentConfig(a.Config))
	if err != nil {
		return join.Cluster{}, err
	}
	earlier, known := earlierCluster(a.StateDir, f.Pods.ManifestDir)
	again := hasRun(a.StateDir)
	wait := cmp.Or(a.FirstWait, firstWait)
	if known || again {
		wait = cmp.Or(a.LaterWait, laterWait)
	}
	c, err := readCluster(ctx, client, wait)
	for again && !known && unreachable(ctx, err) {
		a.Log.Warn("cannot reach the server; this node keeps running as it is; retrying", "err", err, "every", clusterRetry)
		wait = min(2*wait, maxClusterWait)
		c, err = readCluster(ctx, client, wait)
	}
	if known && unreachable(ctx, err) {
		a.Log.Warn("cannot read the cluster's ranges and domains; using the last known ones, for static Pods", "err", err)
		return earlier, nil
	}
	return c, err
}

// unreachable reports whether err is of a server that does not answer, or not yet.
func unreachable(ctx context.Context, err error) bool {
	return err != nil && ctx.Err() == nil && !apierrors.IsNotFound(err) && !apierrors.IsForbidden(err) && !apierrors.IsUnauthorized(err)
}

// hasRun reports whether an agent has run here before. The state directory may be that of a
// start that failed: what the server published is recorded once it has answered, and
// agent.json, which earlier versions have too, once the node was opened.
func hasRun(stateDir string) bool {
	for _, file := range []string{clusterFile(stateDir), base.AgentRecordFile(filepath.Dir(stateDir))} {
		if _, err := os.Stat(file); err == nil {
			return true
		}
	}
	return false
}

func clusterFile(stateDir string) string {
	return filepath.Join(filepath.Dir(stateDir), base.ClusterRecord)
}

// earlierCluster returns what the server had published at the last start, if this node has
// static Pods, which start without it.
func earlierCluster(stateDir, manifestDir string) (c join.Cluster, known bool) {
	entries, err := os.ReadDir(manifestDir)
	if err != nil || len(entries) == 0 {
		return c, false
	}
	b, err := os.ReadFile(clusterFile(stateDir))
	return c, err == nil && json.Unmarshal(b, &c) == nil
}

// RecordCluster keeps what the server has published for the next start.
func RecordCluster(stateDir string, c join.Cluster) error {
	b, err := json.Marshal(c)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(stateDir, 0o700); err != nil {
		return err
	}
	return fileio.Replace(clusterFile(stateDir), b, 0o600)
}

// Use takes the ranges and domains of c. given reports whether a flag was set.
func (f *Flags) Use(c join.Cluster, given func(flag string) bool) error {
	ranges := func(flag string, own *base.Prefixes, server []netip.Prefix) error {
		if len(server) == 0 {
			return nil
		}
		if given(flag) && !sameSet(*own, server) {
			return differs(flag, own.String(), base.ListOf(server))
		}
		*own = server
		return nil
	}
	err := errors.Join(ranges("cluster-cidr", &f.Networks.PodCIDRs, c.PodCIDRs),
		ranges("service-cluster-ip-range", &f.Networks.ServiceCIDRs, c.ServiceCIDRs))
	if len(c.Domains) > 0 {
		if given("cluster-domain") && !slices.Equal(f.DNS.Domains, c.Domains) {
			err = errors.Join(err, differs("cluster-domain", strings.Join(f.DNS.Domains, ","), strings.Join(c.Domains, ",")))
		}
		f.DNS.Domains = c.Domains
	}
	f.Networks.DNS = c.DNS
	if err != nil {
		return err
	}
	return f.Check()
}

func differs(flag, own, server string) error {
	return fmt.Errorf("--%s is %s, but the server has %s: leave the flag out, or start the server with this value", flag, own, server)
}

func sameSet(a, b []netip.Prefix) bool {
	sorted := func(list []netip.Prefix) []netip.Prefix {
		out := slices.Clone(list)
		for i := range out {
			out[i] = out[i].Masked()
		}
		slices.SortFunc(out, netip.Prefix.Compare)
		return out
	}
	return slices.Equal(sorted(a), sorted(b))
}

// readCluster reads what the server publishes, and retries for wait. That nothing
// is there, or may not be read, counts once the server is ready: it publishes, and makes
// its roles, as it starts.
func readCluster(ctx context.Context, client *kubernetes.Clientset, wait time.Duration) (join.Cluster, error) {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	for {
		ready := client.RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
		c, err := join.ReadCluster(ctx, client)
		switch {
		case err == nil, ready == nil && (apierrors.IsNotFound(err) || apierrors.IsForbidden(err)):
			return c, err
		case apierrors.IsUnauthorized(err):
			return c, err
		}
		select {
		case <-ctx.Done():
			if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) {
				return c, err // of a server whose /readyz may not be read
			}
			return c, fmt.Errorf("cannot read the cluster's ranges from the server: %w", err)
		case <-time.After(clusterRetry):
		}
	}
}
