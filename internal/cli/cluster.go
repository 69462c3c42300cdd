package cli

import (
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

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// clusterRetry is the time between two attempts to read the server's ranges.
const clusterRetry = 250 * time.Millisecond

// adopt takes the cluster's ranges and domains from the server, and rejects flags that
// differ: a node with others would answer for the wrong addresses. A server that
// publishes none leaves the flags as they are.
func (f *agentFlags) adopt(ctx context.Context, cmd *cobra.Command, log *slog.Logger, cfg *rest.Config) error {
	return f.adoptWithin(ctx, cmd, log, cfg, firstWait, earlierAfter)
}

// adoptWithin is adopt that waits for firstAfter at the first start, and for earlierAfter at others.
func (f *agentFlags) adoptWithin(
	ctx context.Context, cmd *cobra.Command, log *slog.Logger, cfg *rest.Config, firstAfter, earlierAfter time.Duration,
) error {
	client, err := kubernetes.NewForConfig(agentConfig(cfg))
	if err != nil {
		return err
	}
	wait := firstAfter
	earlier, known := f.earlierCluster()
	if known || f.ran() {
		wait = earlierAfter
	}
	c, err := readCluster(ctx, client, wait)
	for ; !known && f.ran() && unreachable(ctx, err); c, err = readCluster(ctx, client, wait) {
		log.Warn("cannot reach the server; what this node runs goes on; retrying", "err", err, "every", clusterRetry)
		wait = min(2*wait, maxClusterWait)
	}
	if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) {
		log.Info("the server does not publish the cluster's ranges and domains; using those of the flags", "reason", err)
		return nil
	}
	if known && unreachable(ctx, err) {
		log.Warn("cannot read the cluster's ranges and domains; using those of the last start, for static Pods", "err", err)
		c, err = earlier, nil
	}
	if apierrors.IsUnauthorized(err) {
		return fmt.Errorf("%w: the server does not accept the credentials of this node: the cluster's authority was replaced while this node "+
			"was off, or its certificate has ended; delete the Node and join again with a token (--token-file)", err)
	}
	if unreachable(ctx, err) {
		return fmt.Errorf("%w; this node has not run before, and needs the server for its first start: "+
			"see that it runs and that this machine reaches it, and start the agent again", err)
	}
	if err != nil {
		return err
	}
	f.recordCluster(log, c)
	given := func(flag string) bool { return cmd.Flags().Changed(flag) }
	return f.use(c, given)
}

const (
	// firstWait bounds the wait for the server at a node's first start, at which an operator sees the error.
	firstWait = time.Minute
	// earlierAfter is how long an agent with static Pods waits for the server before it
	// begins with what it knows, and another one that has run before until it says so.
	earlierAfter = 10 * time.Second
	// maxClusterWait is the longest time between two such lines of the log.
	maxClusterWait = 5 * time.Minute
)

// unreachable reports whether err is of a server that does not answer, or not yet.
func unreachable(ctx context.Context, err error) bool {
	return err != nil && ctx.Err() == nil && !apierrors.IsNotFound(err) && !apierrors.IsForbidden(err) && !apierrors.IsUnauthorized(err)
}

// ran reports whether an agent has run here before. The state directory may be that of a
// start that failed: what the server published is recorded once it has answered, and
// agent.json, which earlier versions have too, once the node was opened.
func (f *agentFlags) ran() bool {
	for _, file := range []string{f.clusterFile(), agentRecordFile(filepath.Dir(f.stateDir))} {
		if _, err := os.Stat(file); err == nil {
			return true
		}
	}
	return false
}

// clusterRecord is the file of a data directory with what the server has published.
const clusterRecord = "cluster.json"

func (f *agentFlags) clusterFile() string {
	return filepath.Join(filepath.Dir(f.stateDir), clusterRecord)
}

// earlierCluster returns what the server had published at the last start, if this node has
// static Pods, which start without it.
func (f *agentFlags) earlierCluster() (c apiserver.Cluster, known bool) {
	entries, err := os.ReadDir(f.manifestDir)
	if err != nil || len(entries) == 0 {
		return c, false
	}
	b, err := os.ReadFile(f.clusterFile())
	return c, err == nil && json.Unmarshal(b, &c) == nil
}

func (f *agentFlags) recordCluster(log *slog.Logger, c apiserver.Cluster) {
	b, err := json.Marshal(c)
	if err == nil {
		err = os.MkdirAll(f.stateDir, 0o700)
	}
	if err == nil {
		err = fileio.Replace(f.clusterFile(), b, 0o600)
	}
	if err != nil {
		log.Warn("cannot record the cluster's ranges; static Pods will wait for the server after a restart", "err", err)
	}
}

// use takes the ranges and domains of c. given reports whether a flag was.
func (f *agentFlags) use(c apiserver.Cluster, given func(flag string) bool) error {
	ranges := func(flag string, own *prefixesValue, server []netip.Prefix) error {
		if len(server) == 0 {
			return nil
		}
		if given(flag) && !sameSet(*own, server) {
			return differs(flag, own.String(), listOf(server))
		}
		*own = server
		return nil
	}
	err := errors.Join(ranges("cluster-cidr", &f.podCIDRs, c.PodCIDRs), ranges("service-cluster-ip-range", &f.serviceCIDRs, c.ServiceCIDRs))
	if len(c.Domains) > 0 {
		if given("cluster-domain") && !slices.Equal(f.domains, c.Domains) {
			err = errors.Join(err, differs("cluster-domain", strings.Join(f.domains, ","), strings.Join(c.Domains, ",")))
		}
		f.domains = c.Domains
	}
	f.dns = c.DNS
	if err != nil {
		return err
	}
	return f.check()
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
func readCluster(ctx context.Context, client *kubernetes.Clientset, wait time.Duration) (apiserver.Cluster, error) {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	for {
		ready := client.RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
		c, err := apiserver.ReadCluster(ctx, client)
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
