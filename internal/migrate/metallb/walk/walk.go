// Package walk takes the steps of package metallb on a cluster. All that it knows of a migration is in the API: the phase is an
// annotation of the DaemonSet of MetalLB's speakers. So an interrupted walk is continued by another one.
package walk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"

	manifests "github.com/fairlead/fairlead/deploy/kubernetes"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/migrate/act"
	"github.com/fairlead/fairlead/internal/migrate/metallb"
)

// Options are the options of a Walk.
type Options struct {
	Client kubernetes.Interface
	// LB is a client for the objects of fairlead lb.
	LB *v1.Client
	// Out gets a line for each step.
	Out io.Writer
	// Image is fairlead's; empty for the one of the cluster's DaemonSet, or of the manifest where there is none yet.
	Image string
	// Timeout bounds each wait.
	Timeout time.Duration
}

// Walk is one run of apply, verify or rollback.
type Walk struct {
	Options
	act  *act.Cluster
	plan *metallb.Plan
	base *appsv1.DaemonSet // of the manifest
	rest []runtime.Object  // of the manifest, beside the DaemonSet
}

// settling is how long MetalLB's speakers have to choose nodes and announce, from when they are ready: no object of the API shows
// that reliably.
const settling = 10 * time.Second

// New looks at the cluster.
func New(ctx context.Context, o Options) (*Walk, error) {
	c, err := metallb.Look(ctx, o.Client)
	if err != nil {
		return nil, err
	}
	w := &Walk{Options: o, act: &act.Cluster{Client: o.Client, Timeout: o.Timeout}, plan: metallb.Decide(c)}
	if w.Image == "" && c.Fairlead != nil {
		w.Image = c.Fairlead.Spec.Template.Spec.Containers[0].Image
	}
	all, err := act.Decode(manifests.LB)
	for _, o := range all {
		if d, ok := o.(*appsv1.DaemonSet); ok {
			w.base = d
			continue
		}
		if role, ok := o.(*rbacv1.Role); ok {
			w.plan.Permit(role)
		}
		w.rest = append(w.rest, o)
	}
	if err == nil && w.base == nil {
		err = errors.New("the manifest of fairlead lb has no DaemonSet")
	}
	return w, err
}

// Plan is what the walk will do, and what it refuses.
func (w *Walk) Plan() *metallb.Plan { return w.plan }

// Apply changes the cluster to fairlead lb.
func (w *Walk) Apply(ctx context.Context) error {
	if err := w.plan.Broken(); err != nil {
		return fmt.Errorf("nothing was changed: %w", err)
	}
	if r := w.plan.Refused; len(r) > 0 {
		return fmt.Errorf("nothing was changed: %s", r[0])
	}
	return w.change(ctx, false)
}

// Rollback changes the cluster back to MetalLB, and removes what Apply has added.
func (w *Walk) Rollback(ctx context.Context) error {
	err := w.plan.Broken()
	if err == nil {
		err = w.plan.Unread()
	}
	if err == nil && w.plan.Phase != metallb.Before {
		err = w.removable(ctx)
	}
	if err != nil {
		return fmt.Errorf("nothing was changed: %w", err)
	}
	return w.change(ctx, true)
}

// Verify checks the cluster where it is.
func (w *Walk) Verify(ctx context.Context) error {
	if err := w.plan.Broken(); err != nil {
		return err
	}
	for _, step := range metallb.Verification(w.plan.Phase) {
		if err := w.take(ctx, step); err != nil {
			return fmt.Errorf("load balancers (%s): %s: %w", w.plan.Phase, step, err)
		}
	}
	fmt.Fprintf(w.Out, "load balancers: ok (%s), %d addresses\n", w.plan.Phase, len(w.plan.Given()))
	return nil
}

// change takes the cluster to the end of its way. A failure is noted on the DaemonSet of the speakers.
func (w *Walk) change(ctx context.Context, back bool) error {
	phase := w.plan.Phase
	for {
		steps := metallb.Steps(phase, back, w.plan.BGP())
		for _, step := range steps {
			if step.Action != metallb.Enter {
				fmt.Fprintf(w.Out, "load balancers: %s\n", step)
			}
			if err := w.take(ctx, step); err != nil {
				return w.stopped(ctx, phase, step, err)
			}
		}
		if len(steps) == 0 || steps[len(steps)-1].Action != metallb.Enter {
			fmt.Fprintf(w.Out, "load balancers: done: %s\n", phase)
			return nil
		}
		phase = steps[len(steps)-1].Phase
		w.plan.Phase = phase
	}
}

// errChanged is the error where another client has changed the phase.
var errChanged = errors.New("another client changes its phase: only one migration may run at a time")

// stopped is the error of a step, with the two ways on.
func (w *Walk) stopped(ctx context.Context, phase metallb.Phase, step metallb.Step, err error) error {
	if errors.Is(err, errChanged) { // the annotation is the other one's, too
		return err
	}
	text := fmt.Sprintf("%s: %v", step, err)
	noting, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	note := w.update(noting, phase, func(d *appsv1.DaemonSet) (*appsv1.DaemonSet, error) {
		if phase != metallb.Before {
			d.Annotations[metallb.Failure] = text
		}
		return d, nil
	})
	return errors.Join(fmt.Errorf("%s. %s. Go on with 'fairlead migrate apply --component lb', "+
		"or back with 'fairlead migrate rollback --component lb'", text, nodes{w}.announcing(noting)), note)
}

// take takes a step.
func (w *Walk) take(ctx context.Context, step metallb.Step) error {
	switch step.Action {
	case metallb.Install:
		return w.install(ctx)
	case metallb.StopController:
		return w.scaleController(ctx, 0)
	case metallb.StartController:
		return w.scaleController(ctx, w.plan.ControllerReplicas())
	case metallb.ApplyPools:
		return w.act.Within(ctx, w.applyPools)
	case metallb.HoldPools:
		return w.act.Within(ctx, w.holdPools)
	case metallb.AwaitAnnounced:
		return w.act.Within(ctx, w.announced)
	case metallb.AwaitNoSpeakers:
		return w.act.Within(ctx, w.noSpeakers)
	case metallb.AwaitMetalLB:
		return w.act.Within(ctx, w.metalLBReady)
	case metallb.Settle:
		return w.settle(ctx)
	case metallb.ApplyPeers, metallb.HoldPeers, metallb.FreePeers, metallb.MoveNodes, metallb.ReturnNodes, metallb.RenewPods:
		return nodes{w}.take(ctx, step)
	case metallb.Remove:
		return w.remove(ctx)
	}
	from := w.plan.Phase
	return w.act.Within(ctx, func(ctx context.Context) error { return w.enter(ctx, from, step.Phase) })
}

func (w *Walk) settle(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(settling):
		return nil
	}
}

// enter gives the DaemonSet of the speakers its next phase, if it still has the current one.
func (w *Walk) enter(ctx context.Context, from, to metallb.Phase) error {
	err := w.update(ctx, from, func(d *appsv1.DaemonSet) (*appsv1.DaemonSet, error) { return w.plan.Enter(d, to) })
	if errors.Is(err, errChanged) { // or the answer to an earlier try was lost
		if d, again := w.speaker(ctx); again == nil && d.Annotations[metallb.Annotation] == string(to) {
			return nil
		}
	}
	return err
}

// speaker reads the DaemonSet of MetalLB's speakers.
func (w *Walk) speaker(ctx context.Context) (*appsv1.DaemonSet, error) {
	s := w.plan.Speaker()
	return w.Client.AppsV1().DaemonSets(s.Namespace).Get(ctx, s.Name, metav1.GetOptions{})
}

// update changes the DaemonSet of the speakers, if it has a phase. A conflict is tried again, as other programs write it, too.
func (w *Walk) update(ctx context.Context, phase metallb.Phase, change func(*appsv1.DaemonSet) (*appsv1.DaemonSet, error)) error {
	for {
		d, err := w.speaker(ctx)
		if err != nil {
			return err
		}
		if d.Annotations[metallb.Annotation] != string(phase) {
			return errChanged
		}
		if d, err = change(d); err != nil {
			return err
		}
		api := w.Client.AppsV1().DaemonSets(d.Namespace)
		_, err = api.Update(ctx, d, metav1.UpdateOptions{FieldManager: act.Manager})
		if !apierrors.IsConflict(err) || ctx.Err() != nil {
			return err
		}
	}
}
