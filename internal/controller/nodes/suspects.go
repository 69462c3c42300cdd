package nodes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/svc"
)

// setMember records whether a Node's agent watches others, and whether the Node is up.
func (c *lifecycle) setMember(n *corev1.Node, deleted bool) {
	takesPart := !deleted && n.Annotations[svc.PeerWatchAnnotation] == "true"
	if c.options.PeerWatch && c.live.setMember(n.Name, takesPart, !isUnknown(n)) {
		c.suspects.Queue.Add("")
	}
}

// setReport records which Nodes a watcher reports in its Lease.
func (c *lifecycle) setReport(by, text string) {
	if c.options.PeerWatch && c.live.setReport(by, text) {
		c.suspects.Queue.Add("")
	}
}

// reviewSuspects begins and ends suspicions. A suspect is asked to renew its Lease; sync checks it when its
// time is over.
func (c *lifecycle) reviewSuspects(ctx context.Context) error {
	r := c.live.reviewSuspects()
	if r.mass > 0 {
		c.Log.Warn("most nodes cannot be reached by the nodes that watch them: waiting for the grace period of each before its endpoints go",
			"nodes", r.mass, "grace", c.options.GracePeriod)
	}
	for _, name := range r.cleared {
		c.loop.Queue.Add(name) // to remove the annotation
	}
	if r.again > 0 {
		c.suspects.Queue.AddAfter("", r.again)
	}
	var errs []error
	for _, s := range r.ask {
		if err := c.ask(ctx, s.Name); err != nil {
			errs = append(errs, err)
			continue
		}
		c.Log.Info("node is suspected to be down: waiting for it to renew its lease",
			"node", s.Name, "reporters", strings.Join(s.By, ","), "watchers", s.Of)
	}
	return errors.Join(errs...)
}

// ask asks the agent of a suspect to renew its Lease.
func (c *lifecycle) ask(ctx context.Context, name string) error {
	begin := time.Now()
	if err := c.annotateSuspected(ctx, name, begin.UTC().Format(time.RFC3339Nano)); err != nil {
		return err
	}
	c.live.setAsked(name, begin)
	c.loop.Queue.AddAfter(name, c.options.RefuteWithin)
	return nil
}

// unsuspect removes the annotation from a Node that is no longer suspect.
func (c *lifecycle) unsuspect(ctx context.Context, node *corev1.Node) error {
	if _, has := node.Annotations[svc.SuspectedAnnotation]; !has || c.live.suspected(node.Name) {
		return nil
	}
	return c.annotateSuspected(ctx, node.Name, nil)
}

// annotateSuspected sets the annotation, or removes it if value is nil.
func (c *lifecycle) annotateSuspected(ctx context.Context, name string, value any) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]any{svc.SuspectedAnnotation: value}}})
	if err != nil {
		return err
	}
	_, err = c.Client.CoreV1().Nodes().Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("annotation %s of node %s: %w", svc.SuspectedAnnotation, name, err)
	}
	return nil
}
