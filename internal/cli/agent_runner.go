package cli

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/agent"
	"github.com/fairlead/fairlead/internal/apiserver/pki"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/proxy"
	"github.com/fairlead/fairlead/internal/runner"
	"github.com/fairlead/fairlead/internal/svc"
)

// defaultManifestDir is where files of static Pods are.
const defaultManifestDir = "/etc/fairlead/pods.d"

// runner returns what runs Pods, with the endpoint from which the API server gets
// logs, exec, and the status of this node. p is called when the node runs.
func (f *agentFlags) runner(log *slog.Logger, client kubernetes.Interface, cfg *rest.Config, p func() *proxy.Proxy,
	hold <-chan struct{}, peers *agent.Peers, checks *agent.Checks,
) (*runner.Runner, error) {
	ca := func() (*x509.CertPool, error) { return authority(cfg) }
	if _, err := ca(); err != nil {
		return nil, err
	}
	clusterDNS, err := f.clusterDNS()
	if err != nil {
		return nil, err
	}
	uids, err := runner.ParseUIDRange(f.podUIDs)
	if err != nil {
		return nil, fmt.Errorf("--pod-uid-range: %w", err)
	}
	at := netip.AddrPortFrom(f.nodeIPs[0], f.agentPort)
	listener, err := listen(at, "--agent-port")
	if err != nil {
		return nil, fmt.Errorf("%w; --node-ip names an address of this machine", err)
	}
	mirrors := client
	if f.registrar != nil {
		if mirrors, err = kubernetes.NewForConfig(f.registrar); err != nil {
			return nil, errors.Join(err, listener.Close())
		}
	}
	wg, err := f.wireguard()
	if err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	r, err := runner.New(runner.Options{
		Client: client, NodeName: f.nodeName, StateDir: f.stateDir, Log: log,
		PodNetwork: runner.PodNetwork(f.podNetwork), Overlay: link.OverlayOptions{VNI: int(f.vxlanVNI), Port: f.vxlanPort},
		WireGuard:    wg,
		ClusterCIDRs: f.podCIDRs, ServiceCIDRs: f.serviceCIDRs, ServerAddrs: serverAddrs(cfg, log),
		ClusterDNS: clusterDNS, ClusterDomain: f.domains[0],
		Listener: listener, ClientCA: ca, Status: func() any { return p().Status() }, StopPods: f.stopPods,
		Protect: true, UIDs: uids, PodPIDs: f.podPIDs, Hide: []string{filepath.Dir(f.stateDir)}, // pki, and the store
		PodsChanged: func() { p().PodsChanged() },
		DrainWait:   f.drainWait, StaticDir: f.manifestDir, Mirrors: mirrors, Hold: hold,
		NodeSet:   func(n *corev1.Node) { peers.Set(n); checks.Set(n) },
		NodeUnset: func(name string) { peers.Unset(name); checks.Unset(name) },
	})
	if err != nil {
		listener.Close()
	}
	return r, err
}

// wireguard opens what encrypts, nil without --encrypt. Then the private key of an agent that
// did is removed: its public key is no longer this node's, and another Node may have it.
func (f *agentFlags) wireguard() (*link.WireGuard, error) {
	keyFile := filepath.Join(f.stateDir, "wireguard.key")
	if !f.encrypt {
		if err := os.Remove(keyFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("remove the private key of WireGuard, which nothing encrypts with: %w", err)
		}
		return nil, nil
	}
	wg, err := link.OpenWireGuard(keyFile, f.wireguardPort)
	if err != nil {
		return nil, fmt.Errorf("--encrypt: %w", err)
	}
	return wg, nil
}

// serverAddrs returns the addresses of the server behind cfg.
func serverAddrs(cfg *rest.Config, log *slog.Logger) []netip.Addr {
	u, _, err := rest.DefaultServerUrlFor(cfg)
	if err != nil {
		return nil // kubernetes.NewForConfig has rejected it
	}
	if a, err := netip.ParseAddr(u.Hostname()); err == nil {
		return []netip.Addr{a.Unmap()}
	}
	ctx, cancel := context.WithTimeout(context.Background(), resolveTimeout)
	defer cancel()
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", u.Hostname())
	if err != nil {
		log.Warn("cannot resolve the server's name: routes to pods are not checked against its address", "server", u.Host, "err", err)
	}
	for i := range addrs {
		addrs[i] = addrs[i].Unmap()
	}
	return addrs
}

// resolveTimeout bounds how long a start waits for the server's addresses.
const resolveTimeout = 5 * time.Second

// authority returns the certificate authority of the server behind cfg, which has
// also signed the client certificate that the server uses towards agents.
func authority(cfg *rest.Config) (*x509.CertPool, error) {
	text, err := caOf(cfg)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, errors.New("the kubeconfig names no certificate authority: an agent needs it to authenticate the server")
	}
	return pool, nil
}

// caOf returns the authorities by which clients of cfg verify the server, as PEM. The ones in a file
// may change.
func caOf(cfg *rest.Config) ([]byte, error) {
	if len(cfg.CAData) > 0 || cfg.CAFile == "" {
		return cfg.CAData, nil
	}
	text, err := os.ReadFile(cfg.CAFile)
	if err != nil {
		return nil, fmt.Errorf("the server's certificate authority: %w", err)
	}
	return text, nil
}

// certReport returns the annotations by which a node reports what it trusts, and who signed its certificate.
func certReport(cfg *rest.Config) map[string]string {
	ca, err := caOf(cfg)
	if err != nil {
		return nil
	}
	cert := cfg.CertData
	if len(cert) == 0 && cfg.CertFile != "" {
		if cert, err = os.ReadFile(cfg.CertFile); err != nil {
			return nil // it is about to be renewed
		}
	}
	block, _ := pem.Decode(cert)
	if block == nil {
		return nil // it has a token
	}
	leaf, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil
	}
	return map[string]string{svc.AuthoritiesAnnotation: pki.ReportOf(ca, leaf).String()}
}
