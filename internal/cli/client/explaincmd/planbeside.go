package explaincmd

import (
	"context"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/cli/client/explaincmd/effects"
	"github.com/fairlead/fairlead/internal/cli/client/explaincmd/listing"
	"github.com/fairlead/fairlead/internal/cli/client/explaincmd/served"
	"github.com/fairlead/fairlead/internal/lb/claim"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// besideTables are the objects of a plan that no node's table has: TLS Secrets and IPAddressPools.
type besideTables struct {
	client  kubernetes.Interface
	config  *rest.Config
	cluster *cluster
	report  *planReport
	reader  *listing.Reader
	secrets []effects.SecretChange
	pools   []poolChange
}

type poolChange struct{ before, after *v1.IPAddressPool }

// add takes what became of an object, if it is of these kinds.
func (b *besideTables) add(d *done) {
	beforeSecret, wasSecret := d.before.(*corev1.Secret)
	afterSecret, isSecret := d.after.(*corev1.Secret)
	if wasSecret || isSecret {
		b.secrets = append(b.secrets, effects.SecretChange{Before: beforeSecret, After: afterSecret})
	}
	beforePool, wasPool := d.before.(*v1.IPAddressPool)
	afterPool, isPool := d.after.(*v1.IPAddressPool)
	if wasPool || isPool {
		b.pools = append(b.pools, poolChange{beforePool, afterPool})
	}
}

// changes adds what the objects change for Services, as these are after the apply. from has read the objects that may use Secrets.
func (b *besideTables) changes(ctx context.Context, services []*corev1.Service, from *served.Routes) error {
	if len(b.secrets) > 0 {
		users := usersOf(from)
		users.Services = services
		b.report.Changes = append(b.report.Changes, users.Certificates(b.secrets, time.Now())...)
	}
	if len(b.pools) == 0 {
		return nil
	}
	own, err := v1.NewClient(b.config)
	if err != nil {
		return err
	}
	b.reader.Begin("IPAddressPools, with the nodes that announce addresses")
	defer b.reader.End()
	known := readBalancers(ctx, b.client, own, allClaims)
	for _, l := range known.Unread {
		b.report.Problems = append(b.report.Problems, l.Text)
	}
	with := &effects.Balancing{Claims: known.Claims, Speakers: known.Speakers, Local: map[svc.Name][]string{}}
	for _, s := range services {
		if s.Spec.Type == corev1.ServiceTypeLoadBalancer && claim.IsLocal(s) {
			with.Local[svc.NameOf(s)] = b.cluster.objects.ReadyNodes(svc.NameOf(s))
		}
	}
	for _, n := range b.cluster.names {
		with.Nodes = append(with.Nodes, b.cluster.nodes[n])
	}
	after := slices.Clone(known.Pools)
	for _, p := range b.pools {
		name := ""
		if p.before != nil {
			name = p.before.Name
		}
		after = slices.DeleteFunc(after, func(o v1.IPAddressPool) bool { return o.Name == name })
		if p.after != nil {
			if p.before == nil {
				p.after.CreationTimestamp = metav1.Time{} // of the dry run: it is the newest
			}
			after = append(after, *p.after)
		}
	}
	b.report.Changes = append(b.report.Changes, with.Pools(known.Pools, after)...)
	return nil
}

// usersOf returns the objects that may use TLS Secrets, in an order that does not depend on maps.
func usersOf(from *served.Routes) *effects.Users {
	w := from.World()
	return &effects.Users{
		Ingresses: sorted(w.Ingresses), IngressClasses: slices.Collect(maps.Values(w.IngressClasses)),
		Gateways: sorted(w.Gateways), GatewayClasses: slices.Collect(maps.Values(w.GatewayClasses)), Sets: sorted(w.Sets),
		ClassesUnread: w.AnyIngressClass, GatewayClassesUnread: w.AnyGatewayClass, GatewaysUnread: w.Unread != nil,
	}
}

func sorted[T any](all map[svc.Name]T) (out []T) {
	for _, n := range slices.SortedFunc(maps.Keys(all), svc.Name.Compare) {
		out = append(out, all[n])
	}
	return out
}
