package rotation

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/apiserver/pki"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
)

const (
	// lookPeriod is how often a server looks, during a rotation, who has reported.
	lookPeriod = time.Second
	// retryPeriod is the pause after a failure.
	retryPeriod = 5 * time.Second
	// timeout bounds one step.
	timeout = 10 * time.Second
)

// Options are what a Rotation works with.
type Options struct {
	Client kubernetes.Interface
	PKI    *pki.Directory
	Nodes  corelisters.NodeLister
	// Self is the name of this server, and Report what it says.
	Self   string
	Report func() pki.Report
	// Servers returns what the other running servers say, by their names.
	Servers func(context.Context) (map[string]pki.Report, error)
	// Changed is called when the authorities have changed.
	Changed func(context.Context) error
	// Members returns the names of all servers with embedded etcds that are members of one cluster, also of servers that
	// do not run; nil for other servers.
	Members func() []string
	// Restart has the embedded etcd of this server trust the authorities of this moment. If it leads, one of
	// the servers in first is preferred as the next leader.
	Restart func(ctx context.Context, first []string) error
	Log     *slog.Logger
}

// Rotation follows the rotations of a cluster's authority, and begins and ends them.
type Rotation struct {
	o       Options
	secrets informers.SharedInformerFactory // of the one Secret
	lister  corelisters.SecretLister
	changed loop.Signal
	logged  string // the last failure that was; only Run uses it
	pending bool   // Changed has not succeeded; only Run uses it, and CatchUp before
}

// New returns a Rotation for Run.
func New(o Options) *Rotation {
	r := &Rotation{o: o, changed: loop.NewSignal()}
	r.secrets = informers.NewSharedInformerFactoryWithOptions(o.Client, 0, informers.WithNamespace(metav1.NamespaceSystem),
		informers.WithTweakListOptions(func(l *metav1.ListOptions) {
			l.FieldSelector = fields.OneTermEqualSelector("metadata.name", SecretName).String()
		}))
	r.lister = r.secrets.Core().V1().Secrets().Lister()
	return r
}

// CatchUp brings this server into line with the step of this moment, which may have come while it was off: what reads
// its certificates afterwards does not find them half replaced. Run repeats what fails.
func (r *Rotation) CatchUp(ctx context.Context) {
	get, cancel := context.WithTimeout(ctx, timeout)
	secret, err := r.o.Client.CoreV1().Secrets(metav1.NamespaceSystem).Get(get, SecretName, metav1.GetOptions{})
	cancel()
	if err == nil {
		_, err = r.bring(ctx, secret)
	}
	if err != nil && !apierrors.IsNotFound(err) && ctx.Err() == nil {
		r.o.Log.Warn("cannot catch up with the rotation of the authority yet; retrying", "err", err)
	}
}

// Run brings this server into line with every step until ctx ends.
func (r *Rotation) Run(ctx context.Context) {
	wake := func(any) { r.changed.Set() }
	_, err := r.secrets.Core().V1().Secrets().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: wake, UpdateFunc: func(_, o any) { wake(o) }, DeleteFunc: wake,
	})
	if err != nil {
		return // the informer has ended, and so has the server
	}
	r.secrets.StartWithContext(ctx)
	defer r.secrets.Shutdown()
	for ctx.Err() == nil {
		var again <-chan time.Time
		active, err := r.follow(ctx)
		if err == nil && r.o.Members != nil && r.o.Report().PeersBehind() {
			active, err = true, r.restart(ctx)
		}
		if text := fmt.Sprint(err); err != nil && ctx.Err() == nil {
			if again = time.After(retryPeriod); text != r.logged {
				r.o.Log.Error("cannot follow the rotation of the authority; retrying", "err", err, "after", retryPeriod)
			}
			r.logged = text
		} else if r.logged = ""; active {
			again = time.After(lookPeriod)
		}
		select {
		case <-ctx.Done():
		case <-r.changed:
		case <-again:
		}
	}
}

// follow brings this server into line with the Secret that the informer has.
func (r *Rotation) follow(ctx context.Context) (active bool, err error) {
	secret, err := r.lister.Secrets(metav1.NamespaceSystem).Get(SecretName)
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return r.bring(ctx, secret)
}

// bring brings this server into line with the Secret, and takes the step that needs no request.
func (r *Rotation) bring(ctx context.Context, secret *corev1.Secret) (active bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	s, b, err := open(secret, r.o.PKI.Bundle())
	switch {
	case errors.Is(err, errSealed):
		if err := r.left(secret); err != nil || Step(secret.Data[keyStep]) != Done {
			return false, err
		}
		// The key of the old one is gone, and so is the trust in it: a copy of pki/ may be older.
		had := r.o.PKI.Bundle()
		s, b = &state{Step: Done}, &pki.Bundle{Authorities: had.Authorities[:1], Cross: had.Cross}
	case err != nil:
		return false, err
	}
	if !bytes.Equal(b.Published(), r.o.PKI.Bundle().Published()) {
		if err := r.o.PKI.Install(b); err != nil {
			return true, err
		}
		r.pending = true
		r.o.Log.Info("following the rotation of the cluster's authority", "step", s.Step)
	}
	if r.pending {
		if err := r.o.Changed(ctx); err != nil {
			return true, err
		}
		r.pending = false
	}
	if s.Step == Trust {
		waiting, err := r.waiting(ctx, s)
		if err != nil || len(waiting) > 0 {
			return true, err
		}
		if err := r.write(ctx, secret, s, Sign, 0); !apierrors.IsConflict(err) {
			return true, err
		}
		return true, nil // another server was faster; the informer brings what it wrote
	}
	return s.Step != Done, nil
}

// left returns the error of a server that a rotation has left behind, nil for one that has its end or whose authority an
// installer has provided since.
func (r *Rotation) left(secret *corev1.Secret) error {
	kept, mine := string(secret.Data[keyKept]), pki.Hash(r.o.PKI.Authority())
	if kept == mine || kept != "" && r.o.PKI.Provided() || kept == "" && string(secret.Data[keyOld]) == mine {
		return nil
	}
	if kept == "" && string(secret.Data[keyNew]) != mine {
		return errors.New("the cluster's authority is being rotated, and this server has another one: " +
			"copy pki/ of another server here and restart")
	}
	return errors.New("the cluster's authority was rotated while this server was off: copy pki/ of another server here and restart")
}

// write writes the next step. A conflict is the error if another server was faster.
func (r *Rotation) write(ctx context.Context, old *corev1.Secret, s *state, next Step, kept int) error {
	after := *s
	after.Step = next
	secret, err := after.seal(kept)
	if err != nil {
		return err
	}
	secret.ResourceVersion = old.ResourceVersion
	_, err = r.o.Client.CoreV1().Secrets(secret.Namespace).Update(ctx, secret, metav1.UpdateOptions{})
	if err == nil {
		r.o.Log.Info("the rotation of the cluster's authority goes on", "step", next)
	}
	return err
}

// nodePrefix is before the name of a node in Reports.
const nodePrefix = "node "

// Reports returns what all servers and nodes say, by their names.
func (r *Rotation) Reports(ctx context.Context) (map[string]pki.Report, error) {
	out, err := r.o.Servers(ctx)
	if err != nil {
		return nil, err
	}
	if out == nil {
		out = map[string]pki.Report{}
	}
	out[r.o.Self] = r.o.Report()
	nodes, err := r.o.Nodes.List(labels.Everything())
	if err != nil {
		return nil, err
	}
	for _, n := range nodes {
		out[nodePrefix+n.Name] = pki.ParseReport(n.Annotations[svc.AuthoritiesAnnotation])
	}
	return out, nil
}

// waiting returns who keeps a rotation from its next step, and why.
func (r *Rotation) waiting(ctx context.Context, s *state) (out []string, err error) {
	all, err := r.Reports(ctx)
	if err != nil {
		return nil, err
	}
	if r.o.Members != nil {
		out = append(r.absent(all), behind(all)...)
	}
	before, next := pki.Hash(s.Authorities[0].Cert), pki.Hash(s.Authorities[1].Cert)
	signer := pki.Hash(s.Authorities[s.signs()].Cert)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		report := all[name]
		switch {
		case len(report.Trusts) == 0:
			out = append(out, name+" does not report what it trusts: it has an earlier version, or has not started again yet")
		case s.Step == Trust && !report.TrustsAll(before, next):
			out = append(out, name+" does not trust both authorities yet")
		case s.Step != Trust && !report.TrustsAll(signer):
			out = append(out, name+" does not trust the authority that stays")
		case s.Step != Trust && report.Issuer != signer:
			out = append(out, name+" still has a certificate of the authority that goes")
		}
		if s.Step != Trust {
			if report.SeenPartial {
				out = append(out, name+" does not know yet who uses the authority that goes: it looks for a minute at first")
			}
			for _, user := range report.Seen {
				out = append(out, fmt.Sprintf("%s was reached with a certificate of the authority that goes by %s", name, user))
			}
		}
	}
	return out, nil
}
