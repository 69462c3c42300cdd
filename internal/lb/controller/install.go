package controller

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/fairlead/fairlead/internal/lb/claim"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// fieldManager owns the fields of the definitions.
const fieldManager = svc.LoadBalancer

// The first and the longest pause between attempts to install.
const (
	installRetry    = 50 * time.Millisecond
	maxInstallRetry = 5 * time.Second
)

// stepTimeout bounds one step of the controller's writes: a server that accepts a request
// and never answers must not stop it.
const stepTimeout = 30 * time.Second

// install applies this version's definitions of our kinds, and waits until the API server
// serves them. The API server may be down, or start at the same time.
func (c *Controller) install(ctx context.Context) error {
	definitions, err := v1.Definitions()
	if err != nil {
		return err
	}
	steps := []func(context.Context) error{}
	for _, d := range definitions {
		steps = append(steps, func(ctx context.Context) error { return c.define(ctx, d) })
	}
	list := metav1.ListOptions{Limit: 1}
	steps = append(steps,
		func(ctx context.Context) error { _, err := c.lb.Pools.List(ctx, list); return err },
		func(ctx context.Context) error { _, err := c.lb.Peers.List(ctx, list); return err },
		func(ctx context.Context) error { _, err := c.lb.Speakers.List(ctx, list); return err },
		c.ensureKey)
	for _, step := range steps {
		if err := c.untilDone(ctx, step); err != nil {
			return err
		}
	}
	return nil
}

// untilDone repeats step until it succeeds or ctx ends. It logs an error at once, unless a kind that was just defined is not served
// yet, and once a minute from then on.
func (c *Controller) untilDone(ctx context.Context, step func(context.Context) error) error {
	backoff := wait.Backoff{Duration: installRetry, Factor: 1.5, Steps: 1 << 30, Cap: maxInstallRetry}
	begin, warned := time.Now(), time.Time{}
	for {
		limited, cancel := context.WithTimeout(ctx, stepTimeout)
		err := step(limited)
		cancel()
		if err == nil || ctx.Err() != nil {
			return ctx.Err()
		}
		pause := backoff.Step()
		now := time.Now()
		soon := apierrors.IsNotFound(err) && now.Sub(begin) < maxInstallRetry
		if !soon && now.Sub(warned) > time.Minute {
			warned = now
			c.o.Log.Warn("cannot prepare for load balancers; retrying", "err", err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
	}
}

// define applies one definition. Where that is forbidden, an administrator must have
// applied it.
func (c *Controller) define(ctx context.Context, d *apiextensionsv1.CustomResourceDefinition) error {
	text, err := json.Marshal(map[string]any{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
		"metadata": map[string]any{"name": d.Name}, "spec": d.Spec,
	})
	if err != nil {
		return err
	}
	api := c.crds.ApiextensionsV1().CustomResourceDefinitions()
	_, err = api.Patch(ctx, d.Name, types.ApplyPatchType, text, metav1.PatchOptions{FieldManager: fieldManager, Force: new(true)})
	if apierrors.IsForbidden(err) {
		c.o.Log.Warn("no permission to install a definition; using the installed one", "definition", d.Name, "err", err)
		return nil
	}
	if err != nil {
		return fmt.Errorf("definition of %s: %w", d.Name, err)
	}
	return nil
}

// ensureKey creates the Secret with the key of the speakers' messages unless it exists.
func (c *Controller) ensureKey(ctx context.Context) error {
	api := c.client.CoreV1().Secrets(svc.SystemNamespace)
	if have, err := api.Get(ctx, svc.SpeakerKeySecret, metav1.GetOptions{}); err == nil && len(have.Data[claim.KeyEntry]) > 0 {
		return nil
	} else if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("key of the speakers: %w", err)
	}
	key := make([]byte, claim.KeyBytes)
	_, _ = rand.Read(key) // it does not fail (crypto/rand)
	_, err := api.Create(ctx, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: svc.SystemNamespace, Name: svc.SpeakerKeySecret},
		Immutable:  new(true), Data: map[string][]byte{claim.KeyEntry: key},
	}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("key of the speakers: %w", err)
	}
	return nil
}
