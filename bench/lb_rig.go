package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
)

// The network of load balancers: nodes and the client have a second address on it, and
// the pool is a part of it, of 16,382 addresses.
const (
	lbNetwork = "10.64.0.0/16"
	lbHosts   = "10.64.255."
	lbPool    = "10.64.0.1-10.64.63.254"
	lbMetrics = 7472
	lbPeers   = 3 // nodes where more than one speaker is wanted
)

// balancers are 'fairlead lb' and a proxy on some hosts, and a client outside.
type balancers struct {
	bench      *bench
	dir        string
	kubeconfig string
	client     kubernetes.Interface
	hosts      []*host
	lbs        []*process
	proxies    []*process
	controller *process // nil if the controllers of the hosts do its work
	outside    *host
}

// startBalancers starts n hosts with a proxy and a speaker each. With a controller of its
// own, the hosts have only speakers.
func (b *bench) startBalancers(
	ctx context.Context, n int, p proxy, kubeconfig string, client kubernetes.Interface, own bool,
) (s *balancers, err error) {
	s = &balancers{bench: b, kubeconfig: kubeconfig, client: client}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.stop(ctx))
		}
	}()
	if s.dir, err = os.MkdirTemp(b.dir, "lb-"); err != nil {
		return s, err
	}
	if s.outside, err = s.attach(ctx, "outside"); err != nil {
		return s, err
	}
	if own {
		s.controller, err = spawn(nil, s.dir, "lb-controller", b.fairlead, "lb", "--kubeconfig", kubeconfig, "--node-name", "controller",
			"--speaker=false", "--lb-pool", lbPool, "--metrics-bind-address", "")
		if err != nil {
			return s, err
		}
	}
	for i := range n {
		h, err := s.attach(ctx, fmt.Sprintf("balancer%d", i))
		if err != nil {
			return s, err
		}
		s.hosts = append(s.hosts, h)
		if err := errors.Join(h.sysctl("net/ipv4/ip_forward", "1"), makeNode(ctx, client, h)); err != nil {
			return s, err
		}
		dir, err := os.MkdirTemp(s.dir, h.name+"-")
		if err != nil {
			return s, err
		}
		proc, err := p.start(h, dir, kubeconfig)
		if err != nil {
			return s, err
		}
		s.proxies = append(s.proxies, proc)
		args := []string{"lb", "--kubeconfig", kubeconfig, "--node-name", h.name, "--node-ip", h.addr.String(),
			"--metrics-bind-address", fmt.Sprintf("127.0.0.1:%d", lbMetrics)}
		if own {
			args = append(args, "--controller=false")
		} else {
			args = append(args, "--lb-pool", lbPool)
		}
		speaker, err := spawn(h, dir, "lb", b.fairlead, args...)
		if err != nil {
			return s, err
		}
		s.lbs = append(s.lbs, speaker)
	}
	return s, nil
}

// attach makes a host that is on the network of load balancers as well.
func (s *balancers) attach(ctx context.Context, name string) (*host, error) {
	h, err := s.bench.net.host(ctx, fmt.Sprintf("%s%d", name, s.bench.net.count))
	if err != nil {
		return nil, err
	}
	return h, ip(ctx, fmt.Sprintf("-n %s addr add %s%d/16 dev eth0", h.name, lbHosts, h.addr.As4()[3]))
}

func (s *balancers) stop(ctx context.Context) error {
	var errs []error
	for _, p := range append(append(s.lbs, s.proxies...), s.controller) {
		if p != nil {
			errs = append(errs, p.stop())
		}
	}
	for _, h := range append(s.hosts, s.outside) {
		if h != nil {
			errs = append(errs, h.remove(context.WithoutCancel(ctx)))
		}
	}
	return errors.Join(errs...)
}

// inBalancers makes an API server with nodes that have fairlead's proxy for f.
func (b *bench) inBalancers(ctx context.Context, nodes int, f func(*balancers) error) error {
	a, err := b.startAPI(ctx)
	if err != nil {
		return err
	}
	s, err := b.startBalancers(ctx, nodes, b.fairleadProxy(), a.kubeconfig, a.client, true)
	if err != nil {
		return errors.Join(err, a.stop())
	}
	return errors.Join(f(s), s.stop(ctx), a.stop())
}

// reachable writes a kubeconfig that works on every host, for a user if that is not empty.
func reachable(from, to, user string) error {
	cfg, err := clientcmd.LoadFromFile(from)
	if err != nil {
		return err
	}
	for _, c := range cfg.Clusters {
		c.Server = strings.Replace(c.Server, "127.0.0.1", switchAddr, 1)
	}
	for _, a := range cfg.AuthInfos {
		a.Impersonate = user
	}
	return clientcmd.WriteToFile(*cfg, to)
}

var lbRights = regexp.MustCompile("(?s)```yaml\n(apiVersion: rbac.authorization.k8s.io/v1\n.*?)```")

// documentedRights makes the objects that docs/loadbalancer.md has for another Kubernetes.
func (b *bench) documentedRights(ctx context.Context, client kubernetes.Interface) error {
	text, err := os.ReadFile(filepath.Join(b.sources, "docs", "loadbalancer.md"))
	if err != nil {
		return err
	}
	block := lbRights.FindSubmatch(text)
	if block == nil {
		return errors.New("docs/loadbalancer.md has no rights")
	}
	api, options := client.RbacV1(), metav1.CreateOptions{}
	for part := range bytes.SplitSeq(block[1], []byte("---\n")) {
		o, _, err := scheme.Codecs.UniversalDeserializer().Decode(part, nil, nil)
		if err != nil {
			return err
		}
		switch o := o.(type) {
		case *rbacv1.ClusterRole:
			_, err = api.ClusterRoles().Create(ctx, o, options)
		case *rbacv1.ClusterRoleBinding:
			_, err = api.ClusterRoleBindings().Create(ctx, o, options)
		case *rbacv1.Role:
			_, err = api.Roles(o.Namespace).Create(ctx, o, options)
		case *rbacv1.RoleBinding:
			_, err = api.RoleBindings(o.Namespace).Create(ctx, o, options)
		default:
			err = fmt.Errorf("docs/loadbalancer.md: a right of type %T", o)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
