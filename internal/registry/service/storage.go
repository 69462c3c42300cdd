package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	genericrequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/generic"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/util/dryrun"

	"github.com/fairlead/fairlead/internal/registry/networking"
	"github.com/fairlead/fairlead/internal/registry/store"
	"github.com/fairlead/fairlead/internal/svc"
)

// Options is what the storage of Services needs.
type Options struct {
	// RESTOptions gives the back end.
	RESTOptions generic.RESTOptionsGetter
	// ServiceCIDRs are the ranges of --service-cluster-ip-range: one, or one of
	// each family with the default first. They become the ServiceCIDR
	// "kubernetes".
	ServiceCIDRs []netip.Prefix
	// NodePorts is the range of --service-node-port-range.
	NodePorts svc.PortRange
	// StrictLoadBalancers refuses new load balancers of several protocols or
	// of SCTP.
	StrictLoadBalancers bool
	// Networking holds the claims of addresses and the ranges at run time.
	Networking networking.Storage
	// Endpoints is the storage of Endpoints; a deleted Service takes the object
	// of its name along.
	Endpoints rest.GracefulDeleter
	// RepairPeriod is the time between two repairs; 0 means DefaultRepairPeriod.
	RepairPeriod time.Duration
	// WriteTimeout is the longest that a write of a Service may take; 0 means
	// DefaultWriteTimeout.
	WriteTimeout time.Duration
	// ClaimGrace is the age at which a claim without a Service is freed; 0 means
	// three times WriteTimeout. It must be longer than that.
	ClaimGrace time.Duration
	// Alone says that no other server writes to the store, as with an embedded
	// etcd. Claims from before the start are then free of any write on the way,
	// and those without a Service are freed at once.
	Alone bool
	// RangeDrain is how long a deleted ServiceCIDR stays at least; 0 means
	// networking.DefaultDrain.
	RangeDrain time.Duration
	// Log is required.
	Log *slog.Logger
}

// Storage serves Services. Run must run while it is in use.
type Storage struct {
	Service *REST
	Status  *store.SubREST

	alloc  *allocators
	ranges *networking.Controller
	repair *repairer
	ready  chan struct{}
}

// REST is the storage of Services.
type REST struct {
	*store.REST
	alloc     *allocators
	endpoints rest.GracefulDeleter
	// writeTimeout is the longest that a write may take.
	writeTimeout time.Duration
	// ready is closed when the allocators know their ranges and claims.
	ready <-chan struct{}
	log   *slog.Logger
}

// NewStorage builds the storage. It reads and writes nothing before Run.
func NewStorage(o Options) (Storage, error) {
	fams, err := familiesOf(o.ServiceCIDRs)
	if err != nil {
		return Storage{}, err
	}
	s, err := store.New(store.Kind{
		Resource: schema.GroupResource{Resource: "services"}, Singular: "service",
		ShortNames: []string{"svc"}, Categories: []string{"all"},
		New:      func() runtime.Object { return &corev1.Service{} },
		NewList:  func() runtime.Object { return &corev1.ServiceList{} },
		Strategy: strategy{store.Namespaced(), o.StrictLoadBalancers},
		Attrs:    attrs,
		Table:    newTable(),
	}, o.RESTOptions)
	if err != nil {
		return Storage{}, err
	}
	portClaims, err := portClaims(o.RESTOptions)
	if err != nil {
		return Storage{}, err
	}
	ready := make(chan struct{})
	r := &REST{REST: s, endpoints: o.Endpoints, writeTimeout: cmp.Or(o.WriteTimeout, DefaultWriteTimeout), ready: ready, log: o.Log, alloc: &allocators{
		families: fams, log: o.Log,
		addrs: newAddresses(addressClaims(o.Networking.IPAddress)),
		ports: newPorts(portClaims, o.NodePorts),
	}}
	s.Store.ReturnDeletedObject = true
	s.Store.Decorator = r.decorate
	s.Store.AfterDelete = r.afterDelete
	// The status may remove the last finalizer, so it releases too; but it
	// never allocates.
	status := store.NewSub(s, statusStrategy{strategy{Base: store.Namespaced()}})
	s.Store.BeginCreate = r.beginCreate
	s.Store.BeginUpdate = r.beginUpdate
	out := Storage{Service: r, Status: status, alloc: r.alloc, ready: ready}
	out.ranges = networking.NewController(o.Networking, o.ServiceCIDRs, o.RangeDrain, o.Log)
	out.repair = newRepairer(r, o)
	return out, nil
}

// familiesOf returns the families of the ranges, the default first.
func familiesOf(cidrs []netip.Prefix) (families, error) {
	var out families
	for _, p := range cidrs {
		fam := corev1.IPFamily(svc.FamilyOf(p.Addr()).String())
		if out.has(fam) {
			return nil, fmt.Errorf("service cluster IP ranges %v: want one range, or one of each IP family", cidrs)
		}
		out = append(out, fam)
	}
	if len(out) == 0 {
		return nil, errors.New("no service cluster IP range: want one range, or one of each IP family, for example 10.96.0.0/16")
	}
	return out, nil
}

// decorate completes what is read, alone or in a list.
func (r *REST) decorate(obj runtime.Object) {
	switch o := obj.(type) {
	case *corev1.Service:
		r.alloc.families.defaultOnRead(o)
	case *corev1.ServiceList:
		for i := range o.Items {
			r.alloc.families.defaultOnRead(&o.Items[i])
		}
	}
}

// afterDelete gives up what the deleted Service had.
func (r *REST) afterDelete(obj runtime.Object, options *metav1.DeleteOptions) {
	if dryrun.IsDryRun(options.DryRun) {
		return
	}
	s := obj.(*corev1.Service)
	r.alloc.families.defaultOnRead(s)
	ctx := genericrequest.WithNamespace(context.Background(), s.Namespace)
	if r.endpoints != nil {
		ctx, cancel := context.WithTimeout(ctx, cleanupTimeout)
		_, _, err := r.endpoints.Delete(ctx, s.Name, rest.ValidateAllObjectFunc, &metav1.DeleteOptions{})
		cancel()
		if err != nil && !apierrors.IsNotFound(err) {
			r.log.Warn("Endpoints of a deleted Service not removed", "service", ownerOf(s).String(), "err", err)
		}
	}
	t := &transaction{al: r.alloc, owner: ownerOf(s), releases: r.alloc.claimsOf(s)}
	t.commit(ctx)
}

// waitReady waits until the allocators know their ranges, for a short time: a
// server answers requests a moment before.
func (r *REST) waitReady(ctx context.Context) error {
	select {
	case <-r.ready:
		return nil
	default:
	}
	timer := time.NewTimer(readyTimeout)
	defer timer.Stop()
	select {
	case <-r.ready:
		return nil
	case <-ctx.Done():
	case <-timer.C:
	}
	return apierrors.NewInternalError(fmt.Errorf("failed to allocate a serviceIP: %w", errNotReady))
}

const readyTimeout = 5 * time.Second

// Create stores a new Service with what is allocated for it.
func (r *REST) Create(ctx context.Context, obj runtime.Object, validate rest.ValidateObjectFunc, options *metav1.CreateOptions) (runtime.Object, error) {
	ctx, w, cancel := withWrite(ctx, r.writeTimeout)
	defer cancel()
	out, err := r.REST.Create(ctx, obj, func(ctx context.Context, obj runtime.Object) error {
		if validate != nil {
			if err := validate(ctx, obj); err != nil {
				return err
			}
		}
		w.reached = true
		return nil
	}, options)
	w.settle(ctx, err)
	return out, err
}

// Update stores a changed Service, or a new one, with what is allocated for it.
func (r *REST) Update(ctx context.Context, name string, info rest.UpdatedObjectInfo, create rest.ValidateObjectFunc,
	update rest.ValidateObjectUpdateFunc, forceCreate bool, options *metav1.UpdateOptions) (runtime.Object, bool, error) {
	ctx, w, cancel := withWrite(ctx, r.writeTimeout)
	defer cancel()
	out, created, err := r.REST.Update(ctx, name, info, create, update, forceCreate, options)
	w.settle(ctx, err)
	return out, created, err
}

func (r *REST) beginCreate(ctx context.Context, obj runtime.Object, options *metav1.CreateOptions) (genericregistry.FinishFunc, error) {
	s := obj.(*corev1.Service)
	if s.Name == "" { // nothing can be claimed for it
		return nil, invalidService(s, field.ErrorList{field.Required(field.NewPath("metadata", "name"), "name or generateName is required")})
	}
	linkClusterIPs(s, nil)
	if err := r.alloc.families.initFamilies(s, nil); err != nil {
		return nil, err
	}
	return r.begin(ctx, s, r.alloc.planCreate(s), dryrun.IsDryRun(options.DryRun))
}

func (r *REST) beginUpdate(ctx context.Context, obj, old runtime.Object, options *metav1.UpdateOptions) (genericregistry.FinishFunc, error) {
	cur, prev := obj.(*corev1.Service), old.(*corev1.Service)
	r.alloc.families.defaultOnRead(prev)
	keepAllocated(cur, prev)
	linkClusterIPs(cur, prev)
	if err := r.alloc.families.initFamilies(cur, prev); err != nil {
		return nil, err
	}
	return r.begin(ctx, cur, r.alloc.planUpdate(cur, prev), dryrun.IsDryRun(options.DryRun))
}

// begin claims what p wants and hands the transaction to the write that ctx
// belongs to.
func (r *REST) begin(ctx context.Context, s *corev1.Service, p plan, dryRun bool) (genericregistry.FinishFunc, error) {
	w := writeOf(ctx)
	w.restart(ctx)
	if len(p.wants) > 0 {
		if err := r.waitReady(ctx); err != nil {
			return nil, err
		}
	}
	t, err := r.alloc.execute(ctx, s, p, dryRun)
	if err != nil {
		return nil, err
	}
	w.last = t
	return w.finish, nil
}
