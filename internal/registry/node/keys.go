package node

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	genericrequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/util/dryrun"

	"github.com/fairlead/fairlead/internal/registry/store"
	"github.com/fairlead/fairlead/internal/svc"
)

// KeyClaims is the resource of the claims of public keys, which no API shows.
func KeyClaims() schema.GroupResource {
	return schema.GroupResource{Group: coordinationv1.GroupName, Resource: "wireguardkeys"}
}

const (
	// keyLength is that of a public key of WireGuard, in bytes.
	keyLength = 32
	// keyHeld is how long the key of a deleted Node stays that of its name: its agent, which
	// has the key still, registers again.
	keyHeld = time.Hour
	// claimTries bounds the tries to claim a key whose claim changes at the same time.
	claimTries = 5
	// claimTimeout bounds the work on a claim after the write of a Node.
	claimTimeout = 10 * time.Second
)

// keys claims the public keys of WireGuard for Nodes: of two Nodes with one key the other
// nodes believe only one, so that whoever copied the key of another node, which all can
// read, would cut it off. A claim is an object whose name is the key, so that of two writers
// at two servers one gets it. A write that does not change the key costs nothing.
type keys struct {
	claims *store.REST
	nodes  getter
	log    *slog.Logger
}

func newKeys(opts generic.RESTOptionsGetter, nodes getter, log *slog.Logger) (*keys, error) {
	s, err := store.New(store.Kind{
		Resource: KeyClaims(), Singular: "wireguardkey",
		// A holder is all there is to say about a key.
		New:      store.Empty[coordinationv1.Lease],
		NewList:  store.Empty[coordinationv1.LeaseList],
		Strategy: store.Rules[*coordinationv1.Lease]{ClusterScoped: true}.Strategy(),
	}, opts)
	if err != nil {
		return nil, fmt.Errorf("cannot build the storage of claims of public keys: %w", err)
	}
	s.TTLFunc = func(obj runtime.Object, _ uint64, _ bool) (uint64, error) {
		if d := obj.(*coordinationv1.Lease).Spec.LeaseDurationSeconds; d != nil {
			return uint64(*d), nil
		}
		return 0, nil
	}
	return &keys{claims: s, nodes: nodes, log: log}, nil
}

// keyOf returns the name of the claim of a Node's public key, "" if the Node has none.
func keyOf(n *corev1.Node) (string, *field.Error) {
	value := n.Annotations[svc.PublicKeyAnnotation]
	if value == "" {
		return "", nil
	}
	key, err := base64.StdEncoding.DecodeString(value)
	if err != nil || len(key) != keyLength || [keyLength]byte(key) == [keyLength]byte{} {
		return "", field.Invalid(keyPath(), value, "must be a public key of WireGuard: 32 bytes that are not all zero, in base64")
	}
	return hex.EncodeToString(key), nil
}

func keyPath() *field.Path {
	return field.NewPath("metadata", "annotations").Key(svc.PublicKeyAnnotation)
}

// holder is what a claim has of its Node. The UID tells it from one that is created again.
func holder(n *corev1.Node) string { return n.Name + "/" + string(n.UID) }

// claim is a claim as a write has left or found it.
type claim struct{ key, version string }

// keyWrite follows one write of a Node through all its attempts.
type keyWrite struct {
	keys      *keys
	name, key string // of the Node as the last attempt has it
	dryRun    bool
	// made are the claims of this write, old that of the key which the Node had before the
	// last attempt, the zero claim if it keeps that or had none.
	made []claim
	old  claim
}

// begin claims the key of a Node. It is the last step before the write, and
// part of each attempt; before is nil for a new Node.
func (w *keyWrite) begin(ctx context.Context, n, before *corev1.Node) error {
	w.name, w.old = n.Name, claim{}
	had := ""
	if before != nil {
		if n.Annotations[svc.PublicKeyAnnotation] == before.Annotations[svc.PublicKeyAnnotation] {
			if len(w.made) > 0 { // another write came between two attempts
				w.key, _ = keyOf(n)
			}
			return nil
		}
		had, _ = keyOf(before) // one that is invalid has no claim
	}
	key, invalid := keyOf(n)
	w.key = key
	if invalid == nil && key != "" && key != had {
		made, other, err := w.keys.claim(ctx, key, n, w.dryRun)
		if err != nil {
			return err
		}
		if other != "" {
			invalid = field.Invalid(keyPath(), n.Annotations[svc.PublicKeyAnnotation], fmt.Sprintf("is the key of node %q, and each node "+
				"must have its own: if this machine is a copy of that one, or has another name now, remove wireguard.key in its agent's "+
				"data directory and start the agent again", other))
		} else {
			w.made = append(w.made, made)
		}
	}
	if invalid != nil {
		return apierrors.NewInvalid(corev1.SchemeGroupVersion.WithKind("Node").GroupKind(), n.Name, field.ErrorList{invalid})
	}
	if had == "" || had == key || w.dryRun {
		return nil
	}
	if c, err := w.keys.get(ctx, had); err == nil && nameOf(c) == n.Name {
		w.old = claim{had, c.ResourceVersion}
	}
	return nil
}

// settle releases, after the write, the claims of all keys that the Node does not have.
// One that another write has made its own since then has another version, and stays.
func (w *keyWrite) settle(ctx context.Context, err error) {
	if w.dryRun || len(w.made) == 0 && w.old == (claim{}) {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), claimTimeout)
	defer cancel()
	if err != nil {
		w.key = w.stored(ctx)
	} else if w.old != (claim{}) {
		w.made = append(w.made, w.old)
	}
	for _, c := range w.made {
		if c.key == w.key {
			continue
		}
		_, _, err := w.keys.claims.Delete(ctx, c.key, rest.ValidateAllObjectFunc,
			&metav1.DeleteOptions{Preconditions: &metav1.Preconditions{ResourceVersion: &c.version}})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			w.keys.log.Warn("cannot release the claim of a public key: no node but this one can have the key", "node", w.name, "err", err)
		}
	}
}

// stored returns the key of the Node that there is after a write that failed, or of which it
// is not known whether it did; the claim that the write has made of it becomes that Node's.
func (w *keyWrite) stored(ctx context.Context) string {
	obj, err := w.keys.nodes.Get(ctx, w.name, &metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return ""
	}
	key := w.key
	if err == nil {
		key, _ = keyOf(obj.(*corev1.Node))
		if slices.ContainsFunc(w.made, func(c claim) bool { return c.key == key }) {
			_, _, err = w.keys.claim(ctx, key, obj.(*corev1.Node), false)
		}
	}
	if err != nil {
		w.keys.log.Warn("cannot look whose a claimed public key is: no node but this one can have the key", "node", w.name, "err", err)
	}
	return key
}

// hold has the claim of a deleted Node end, later.
func (k *keys) hold(n *corev1.Node) {
	key, _ := keyOf(n)
	if key == "" {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), claimTimeout)
	defer cancel()
	seconds := int32(keyHeld / time.Second)
	_, err := k.change(ctx, key, func(c *coordinationv1.Lease) bool {
		c.Spec.LeaseDurationSeconds = &seconds
		return *c.Spec.HolderIdentity == holder(n)
	})
	if err != nil && !apierrors.IsNotFound(err) {
		k.log.Warn("cannot have the claim of a deleted Node's public key end: no node of another name can have the key",
			"node", n.Name, "err", err)
	}
}

// nameOf returns the name of the Node that a claim is for.
func nameOf(c *coordinationv1.Lease) string {
	name, _, _ := strings.Cut(*c.Spec.HolderIdentity, "/")
	return name
}

// claim makes a key that of a Node, or returns the name of the other one that has it. With
// check it writes nothing.
func (k *keys) claim(ctx context.Context, key string, n *corev1.Node, check bool) (made claim, other string, err error) {
	ctx = genericrequest.WithNamespace(ctx, metav1.NamespaceNone)
	holder := holder(n)
	for range claimTries {
		var c runtime.Object
		if check {
			c, err = k.get(ctx, key)
		} else {
			c, err = k.change(ctx, key, func(c *coordinationv1.Lease) bool {
				if nameOf(c) != n.Name {
					return false
				}
				now := metav1.NowMicro() // so that each write has its own version
				c.Spec = coordinationv1.LeaseSpec{HolderIdentity: &holder, RenewTime: &now}
				return true
			})
		}
		if apierrors.IsNotFound(err) && !check {
			c, err = k.claims.Create(ctx, &coordinationv1.Lease{
				ObjectMeta: metav1.ObjectMeta{Name: key}, Spec: coordinationv1.LeaseSpec{HolderIdentity: &holder},
			}, rest.ValidateAllObjectFunc, &metav1.CreateOptions{})
		}
		switch {
		case err == nil:
			l := c.(*coordinationv1.Lease)
			if nameOf(l) != n.Name {
				return claim{}, nameOf(l), nil
			}
			return claim{key, l.ResourceVersion}, "", nil
		case check && apierrors.IsNotFound(err):
			return claim{}, "", nil
		case !apierrors.IsNotFound(err) && !apierrors.IsAlreadyExists(err) && !apierrors.IsConflict(err):
			return claim{}, "", fmt.Errorf("cannot claim the public key of Node %s: %w", n.Name, err)
		}
	}
	return claim{}, "", apierrors.NewServerTimeout(corev1.Resource("nodes"), "claim the public key of", 1)
}

func (k *keys) get(ctx context.Context, key string) (*coordinationv1.Lease, error) {
	obj, err := k.claims.Get(genericrequest.WithNamespace(ctx, metav1.NamespaceNone), key, &metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	return obj.(*coordinationv1.Lease), nil
}

// change changes a claim unless change returns false, and returns it as it is then.
func (k *keys) change(ctx context.Context, key string, change func(*coordinationv1.Lease) bool) (runtime.Object, error) {
	out, _, err := k.claims.Update(genericrequest.WithNamespace(ctx, metav1.NamespaceNone), key,
		rest.DefaultUpdatedObjectInfo(nil, func(_ context.Context, _, old runtime.Object) (runtime.Object, error) {
			c := old.(*coordinationv1.Lease).DeepCopy()
			if !change(c) {
				return old, nil
			}
			return c, nil
		}), rest.ValidateAllObjectFunc, rest.ValidateAllObjectUpdateFunc, false, &metav1.UpdateOptions{})
	return out, err
}

// create returns what a write does before a new Node is stored: validate, then the claim.
func (w *keyWrite) create(validate rest.ValidateObjectFunc) rest.ValidateObjectFunc {
	return func(ctx context.Context, obj runtime.Object) error {
		if validate != nil {
			if err := validate(ctx, obj.DeepCopyObject()); err != nil {
				return err
			}
		}
		return w.begin(ctx, obj.(*corev1.Node), nil)
	}
}

// update is create for a changed Node.
func (w *keyWrite) update(validate rest.ValidateObjectUpdateFunc) rest.ValidateObjectUpdateFunc {
	return func(ctx context.Context, obj, old runtime.Object) error {
		if validate != nil {
			if err := validate(ctx, obj.DeepCopyObject(), old.DeepCopyObject()); err != nil {
				return err
			}
		}
		return w.begin(ctx, obj.(*corev1.Node), old.(*corev1.Node))
	}
}

// keyedREST is the storage of Nodes whose writes claim keys.
type keyedREST struct {
	*store.REST
	keys *keys
}

// Create stores a new Node if no other has its key.
func (r keyedREST) Create(ctx context.Context, obj runtime.Object, validate rest.ValidateObjectFunc,
	options *metav1.CreateOptions) (runtime.Object, error) {
	w := &keyWrite{keys: r.keys, dryRun: dryrun.IsDryRun(options.DryRun)}
	out, err := r.REST.Create(ctx, obj, w.create(validate), options)
	w.settle(ctx, err)
	return out, err
}

// Update stores a changed Node if no other has its key.
func (r keyedREST) Update(ctx context.Context, name string, info rest.UpdatedObjectInfo, create rest.ValidateObjectFunc,
	update rest.ValidateObjectUpdateFunc, force bool, options *metav1.UpdateOptions) (runtime.Object, bool, error) {
	w := &keyWrite{keys: r.keys, dryRun: dryrun.IsDryRun(options.DryRun)}
	out, created, err := r.REST.Update(ctx, name, info, w.create(create), w.update(update), force, options)
	w.settle(ctx, err)
	return out, created, err
}

// keyedStatus is keyedREST for the status, whose writes may change annotations, too.
type keyedStatus struct {
	*store.SubREST
	keys *keys
}

// Update stores the changed status if no other Node has the key in the annotations.
func (r keyedStatus) Update(ctx context.Context, name string, info rest.UpdatedObjectInfo, create rest.ValidateObjectFunc,
	update rest.ValidateObjectUpdateFunc, force bool, options *metav1.UpdateOptions) (runtime.Object, bool, error) {
	w := &keyWrite{keys: r.keys, dryRun: dryrun.IsDryRun(options.DryRun)}
	out, created, err := r.SubREST.Update(ctx, name, info, w.create(create), w.update(update), force, options)
	w.settle(ctx, err)
	return out, created, err
}
