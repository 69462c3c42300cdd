// Package walk takes the steps of package coredns on a cluster. All that it knows of a migration is in the API: the phase is an
// annotation of CoreDNS's Deployment. So an interrupted walk is continued by another one.
package walk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"

	manifests "github.com/fairlead/fairlead/deploy/kubernetes"
	"github.com/fairlead/fairlead/internal/migrate/act"
	"github.com/fairlead/fairlead/internal/migrate/coredns"
	"github.com/fairlead/fairlead/internal/svc"
)

// Options are the options of a Walk.
type Options struct {
	Client kubernetes.Interface
	// Out gets a line for each step.
	Out io.Writer
	// Image is fairlead's; empty for the one of the cluster's Deployment, or of the manifest where there is none yet.
	Image string
	// Timeout bounds each wait.
	Timeout time.Duration
}

// Walk is one run of apply, verify or rollback.
type Walk struct {
	Options
	act  *act.Cluster
	plan *coredns.Plan
	base *appsv1.Deployment // of the manifest
	rest []runtime.Object   // of the manifest, beside the Deployment
}

// New looks at the cluster.
func New(ctx context.Context, o Options) (*Walk, error) {
	w := &Walk{Options: o, act: &act.Cluster{Client: o.Client, Timeout: o.Timeout}}
	c, err := w.look(ctx)
	if err != nil {
		return nil, err
	}
	w.plan = coredns.Decide(c)
	for _, d := range c.Deployments {
		if d.Name == coredns.Name && w.Image == "" {
			w.Image = d.Spec.Template.Spec.Containers[0].Image
		}
	}
	all, err := act.Decode(manifests.DNS)
	for _, o := range all {
		switch o := o.(type) {
		case *appsv1.Deployment:
			w.base = o
		case *policyv1.PodDisruptionBudget:
			w.rest = append(w.rest, coredns.Budget(o))
		default:
			w.rest = append(w.rest, o)
		}
	}
	if err == nil && w.base == nil {
		err = errors.New("the manifest of fairlead dns has no Deployment")
	}
	return w, err
}

// look reads what runs on the cluster.
func (w *Walk) look(ctx context.Context) (*coredns.Cluster, error) {
	c := &coredns.Cluster{ConfigMaps: map[string]*corev1.ConfigMap{}}
	deployments, err := w.Client.AppsV1().Deployments(svc.SystemNamespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for i := range deployments.Items {
		c.Deployments = append(c.Deployments, &deployments.Items[i])
	}
	configs, err := w.Client.CoreV1().ConfigMaps(svc.SystemNamespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for i := range configs.Items {
		c.ConfigMaps[configs.Items[i].Name] = &configs.Items[i]
	}
	services, err := w.Client.CoreV1().Services("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for i := range services.Items {
		c.Services = append(c.Services, &services.Items[i])
	}
	return c, nil
}

// Plan is what the walk will do, and what it refuses.
func (w *Walk) Plan() *coredns.Plan { return w.plan }

// Apply changes the cluster to fairlead dns.
func (w *Walk) Apply(ctx context.Context) error {
	if r := w.plan.Refused; len(r) > 0 {
		return fmt.Errorf("nothing was changed: %s", r[0])
	}
	return w.change(ctx, false)
}

// Rollback changes the cluster back to CoreDNS, and removes what Apply has added.
func (w *Walk) Rollback(ctx context.Context) error {
	if err := w.plan.Broken(); err != nil {
		return fmt.Errorf("nothing was changed: %w", err)
	}
	return w.change(ctx, true)
}

// Verify checks the cluster where it is.
func (w *Walk) Verify(ctx context.Context) error {
	if err := w.plan.Broken(); err != nil {
		return err
	}
	for _, step := range coredns.Verification(w.plan.Phase) {
		if err := w.take(ctx, step); err != nil {
			return fmt.Errorf("DNS (%s): %s: %w", w.plan.Phase, step, err)
		}
	}
	fmt.Fprintf(w.Out, "DNS: ok (%s)\n", w.plan.Phase)
	return nil
}

// change takes the cluster to the end of its way. A failure is noted on CoreDNS's Deployment.
func (w *Walk) change(ctx context.Context, back bool) error {
	phase := w.plan.Phase
	for {
		steps := coredns.Steps(phase, back)
		for _, step := range steps {
			if step.Action != coredns.Enter {
				fmt.Fprintf(w.Out, "DNS: %s\n", step)
			}
			if err := w.take(ctx, step); err != nil {
				return w.stopped(ctx, phase, step, err)
			}
		}
		if len(steps) == 0 || steps[len(steps)-1].Action != coredns.Enter {
			fmt.Fprintf(w.Out, "DNS: done: %s\n", phase)
			return nil
		}
		phase = steps[len(steps)-1].Phase
		w.plan.Phase = phase
	}
}

// settling is the time in which the nodes see a change of a Service: kube-proxy applies changes once a second at most, and takes
// seconds for one on a busy node.
const settling = 10 * time.Second

func (w *Walk) settle(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(settling):
		return nil
	}
}

// errChanged is the error where another client has changed the phase.
var errChanged = errors.New("another client changes its phase: only one migration may run at a time")

// stopped is the error of a step, with the two ways on.
func (w *Walk) stopped(ctx context.Context, phase coredns.Phase, step coredns.Step, err error) error {
	if errors.Is(err, errChanged) { // the annotation is the other one's, too
		return err
	}
	text := fmt.Sprintf("%s: %v", step, err)
	noting, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	note := w.update(noting, phase, func(d *appsv1.Deployment) *appsv1.Deployment {
		if phase != coredns.Before {
			d.Annotations[coredns.Failure] = text
		}
		return d
	})
	return errors.Join(fmt.Errorf("%s. The Service keeps the servers that it has. Go on with 'fairlead migrate apply --component dns', "+
		"or back with 'fairlead migrate rollback --component dns'", text), note)
}

// take takes a step.
func (w *Walk) take(ctx context.Context, step coredns.Step) error {
	switch step.Action {
	case coredns.Install:
		return w.install(ctx, step.Joined)
	case coredns.Compare:
		return w.compare(ctx)
	case coredns.Verify:
		return w.verify(ctx)
	case coredns.AwaitFairlead:
		return w.act.Within(ctx, w.behindFairlead)
	case coredns.AwaitCoreDNS:
		return w.act.Within(ctx, w.behindCoreDNS)
	case coredns.Narrow, coredns.Widen:
		return w.act.Within(ctx, func(ctx context.Context) error { return w.selectOnlyOurs(ctx, step.Action == coredns.Narrow) })
	case coredns.Leave:
		return w.act.Within(ctx, w.leave)
	case coredns.Settle:
		return w.settle(ctx)
	case coredns.AwaitNoCoreDNS:
		return w.act.Within(ctx, w.noCoreDNS)
	case coredns.Remove:
		return w.remove(ctx)
	}
	from := w.plan.Phase
	return w.act.Within(ctx, func(ctx context.Context) error { return w.enter(ctx, from, step.Phase) })
}

// enter gives CoreDNS's Deployment its next phase, if it still has the current one.
func (w *Walk) enter(ctx context.Context, from, to coredns.Phase) error {
	err := w.update(ctx, from, func(d *appsv1.Deployment) *appsv1.Deployment { return w.plan.Enter(d, to) })
	if errors.Is(err, errChanged) && w.at(ctx) == to { // the answer to an earlier try was lost
		return nil
	}
	return err
}

// at is the phase that the cluster has.
func (w *Walk) at(ctx context.Context) coredns.Phase {
	theirs, _, _ := w.plan.Theirs()
	d, err := w.Client.AppsV1().Deployments(theirs.Namespace).Get(ctx, theirs.Name, metav1.GetOptions{})
	if err != nil {
		return "?"
	}
	return coredns.Phase(d.Annotations[coredns.Annotation])
}

// update changes CoreDNS's Deployment, if it has a phase. A conflict is tried again, as other programs write it, too.
func (w *Walk) update(ctx context.Context, phase coredns.Phase, change func(*appsv1.Deployment) *appsv1.Deployment) error {
	theirs, _, _ := w.plan.Theirs()
	api := w.Client.AppsV1().Deployments(theirs.Namespace)
	for {
		d, err := api.Get(ctx, theirs.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if d.Annotations[coredns.Annotation] != string(phase) {
			return errChanged
		}
		_, err = api.Update(ctx, change(d.DeepCopy()), metav1.UpdateOptions{FieldManager: act.Manager})
		if !apierrors.IsConflict(err) || ctx.Err() != nil {
			return err
		}
	}
}
