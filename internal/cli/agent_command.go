package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"sync"

	"github.com/spf13/cobra"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/offline"
	"github.com/fairlead/fairlead/internal/runner"
	"github.com/fairlead/fairlead/internal/servers"
)

type agentCommand struct {
	*global
	agent               agentFlags
	servers             []string
	kubeconfig, dataDir string
	token               joinFlags
}

func newAgent(g *global) *cobra.Command {
	a := &agentCommand{global: g}
	f := &a.agent
	cmd := &cobra.Command{
		Use:   "agent",
		Short: "Make this machine a node: proxy, DNS and Pods",
		Long: `Make this machine a node of a server: it brings connections to Services to their
endpoints, answers DNS, and runs Pods as processes. What it wrote to the kernel and
the Pods it started stay when it stops, and are found again when it starts;
'fairlead cleanup' removes them.`,
		Example: `  fairlead agent --server https://192.0.2.10:6443 --token-file /root/node-token
  fairlead agent --kubeconfig /etc/fairlead/node.kubeconfig --node-ip 192.0.2.11`,
		Args: noArgs,
		PreRunE: func(*cobra.Command, []string) error {
			if f.approvalTimeout <= 0 {
				return usagef("--approval-timeout is %s: want a time such as 1h", f.approvalTimeout)
			}
			return f.check()
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return a.run(cmd) },
	}
	f.add(cmd)
	f.networkFlags = defaultNetworks()
	const same = "; the server says them, and others are rejected (the default is for a server that does not)"
	f.addNetworks(cmd, "ranges of ClusterIPs"+same, "ranges of the Pods' addresses"+same)
	flags := cmd.Flags()
	flags.StringSliceVar(&a.servers, "server", nil,
		"URL of a server; of several, give one or more: the node learns of the others, and uses whichever answers")
	flags.StringVar(&a.token.file, "token-file", "",
		"file with a join token ('fairlead token create'), for the first start alone (default $"+tokenEnv+")")
	flags.StringVar(&a.token.text, "token", "",
		"a join token, or a file with it; others on this machine see it in the list of processes: use --token-file")
	flags.DurationVar(&f.approvalTimeout, "approval-timeout", join.DefaultApprovalTimeout,
		"how long to wait for an administrator's approval with a token of 'fairlead token create --needs-approval'; "+
			"a later start goes on with the same request")
	flags.StringVar(&a.kubeconfig, "kubeconfig", "", "kubeconfig of this node, in place of --server and --token-file")
	flags.StringVar(&a.dataDir, "data-dir", defaultDataDir(), "directory for the state of this node")
	return cmd
}

// serversRecord is the file of a data directory with the servers that a node knows.
const serversRecord = "servers.json"

// run makes this machine a node until the command's context ends.
func (a *agentCommand) run(cmd *cobra.Command) error {
	ctx, f := cmd.Context(), &a.agent
	log, err := a.logger()
	if err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("an agent changes this machine's network and needs root: run it with sudo, " +
			"or try 'fairlead up', which makes a namespace of its own")
	}
	if err := checkResolver(f.configureResolver); err != nil {
		return err
	}
	if len(f.lb.pools) > 0 {
		log.Warn("--lb-pool has no effect on a node: the server gives out addresses; give it --lb-pool, or make an IPAddressPool")
	}
	f.stateDir, f.early = nodeState(a.dataDir), true
	if err := f.makeState(); err != nil { // before anything is written
		return err
	}
	cfg, identity, err := f.identity(ctx, log, a.servers, a.token, a.kubeconfig)
	if err != nil {
		return err
	}
	stop, err := a.balance(ctx, log, cfg, identity)
	if err != nil {
		return err
	}
	defer stop()
	defer beside(ctx, func(ctx context.Context) { warnOfInlineCertificate(ctx, log, cfg) })()
	if len(f.nodeIPs) == 0 {
		if f.nodeIPs, err = machineAddresses(serverAddrs(cfg, log)); err != nil {
			return err
		}
	}
	lock, err := proxyLock.wait(ctx, log)
	if err != nil {
		return err
	}
	defer lock.Close()
	dnsHeld, err := f.lockDNS(ctx, log)
	if err != nil {
		return err
	}
	defer dnsHeld.Close()
	if err := f.adopt(ctx, cmd, log, cfg); err != nil {
		return err
	}
	machine := f.machine(false)
	var warning sync.WaitGroup
	defer warning.Wait()
	warning.Go(func() { warnOfMachine(ctx, log, machine, machineTimeout) })
	if identity != nil {
		f.certChanged = identity.Changed()
	}
	n, err := f.open(ctx, log, cfg)
	if err != nil {
		return err
	}
	if err := f.writeRecord(first(a.servers), a.kubeconfig); err != nil {
		return fmt.Errorf("the node's state directory: %w", err)
	}
	if identity != nil {
		n.components = append(n.components, component{name: "certificate", run: identity.Run})
	}
	return runAll(ctx, log, func() {
		fmt.Fprintf(a.out, "node %s at %s is up; DNS answers on %s\n", f.nodeName, listOf(f.nodeIPs), n.dnsAddresses())
	}, n.components...)
}

// balance has the clients of cfg, and those that renew the certificate, use whichever server
// answers, until stop is called; those of cfg use the last known state while none does.
func (a *agentCommand) balance(ctx context.Context, log *slog.Logger, cfg *rest.Config, identity *join.Node) (stop func(), err error) {
	if throughProxy(cfg) {
		return func() {}, nil // what is behind it is not this machine's to choose
	}
	b, err := servers.New(servers.Options{
		Node: a.agent.nodeName, Config: cfg, More: a.servers[min(1, len(a.servers)):],
		File: filepath.Join(a.dataDir, serversRecord), Log: log,
	})
	if err != nil {
		return nil, err
	}
	if identity != nil {
		identity.Use(b.Use)
	}
	known, err := offline.Open(runner.KnownDir(a.agent.stateDir), log)
	if err != nil {
		return nil, err
	}
	b.Use(cfg)
	known.Use(cfg)
	a.agent.balancer = b
	end := beside(ctx, func(ctx context.Context) { _ = b.Run(ctx) })
	return func() { end(); known.Close() }, nil
}

// throughProxy reports whether the clients of cfg connect to a proxy, of HTTP or SOCKS.
func throughProxy(cfg *rest.Config) bool {
	server, _, err := rest.DefaultServerUrlFor(cfg)
	if err != nil || cfg.Proxy != nil {
		return cfg.Proxy != nil
	}
	at, err := http.ProxyFromEnvironment(&http.Request{URL: server})
	return err == nil && at != nil
}

// first returns the first element of list, "" if there is none.
func first(list []string) string {
	if len(list) == 0 {
		return ""
	}
	return list[0]
}

// identity returns how an agent reaches the server, and as whom. A machine that has
// joined needs no token; with one it gets a certificate for this node's name. The
// join.Node renews it.
func (f *agentFlags) identity(
	ctx context.Context, log *slog.Logger, urls []string, flags joinFlags, kubeconfig string,
) (*rest.Config, *join.Node, error) {
	switch {
	case kubeconfig != "" && (len(urls) > 0 || flags != joinFlags{}):
		return nil, nil, usagef("--kubeconfig takes the place of --server and --token-file: give one or the other")
	case kubeconfig != "":
		c := clientFlags{kubeconfig: kubeconfig}
		cfg, _, err := c.load()
		return cfg, nil, err
	case len(urls) == 0:
		return nil, nil, usagef("which server? give --server URL, at the first start with --token-file FILE, or --kubeconfig FILE")
	}
	token, err := flags.read()
	if err != nil {
		return nil, nil, err
	}
	dir := nodePKI(filepath.Dir(f.stateDir))
	n, err := join.Open(urls[0], f.nodeName, dir, log)
	switch {
	case err == nil && (token == "" || n.Of(token)):
		return n.Config(), n, nil
	case token == "" && errors.Is(err, fs.ErrNotExist):
		return nil, nil, usagef("this machine has not joined %s yet: give --token-file FILE with what 'fairlead token create' prints there",
			urls[0])
	case token == "":
		return nil, nil, fmt.Errorf("the certificate of this node in %s cannot be used: %w; join again with --token-file FILE and what "+
			"'fairlead token create' prints on the server, after 'kubectl delete node %s'", dir, err, f.nodeName)
	}
	boot, bootErr := firstContact(ctx, urls, token)
	if bootErr != nil && err == nil {
		log.Warn("the join token is not of this server's authority, or the server does not answer; going on with the certificate of this node",
			"err", bootErr)
		return n.Config(), n, nil
	}
	if bootErr != nil {
		return nil, nil, bootErr
	}
	if t, parseErr := join.Parse(token); parseErr == nil && t.Approval {
		n, err = join.NewApprovedNode(ctx, boot, f.nodeName, dir, f.approvalTimeout, log)
	} else {
		n, err = join.NewNode(ctx, boot, f.nodeName, dir, log)
	}
	if err != nil {
		return nil, nil, err
	}
	return n.Config(), n, nil
}

// firstContact returns how a machine that joins reaches the first of urls that answers.
func firstContact(ctx context.Context, urls []string, token string) (*rest.Config, error) {
	var errs []error
	for _, server := range urls {
		cfg, err := join.Config(ctx, server, token)
		if err == nil {
			return cfg, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}
