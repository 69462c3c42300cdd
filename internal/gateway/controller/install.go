package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/api"
	"github.com/fairlead/fairlead/internal/gateway/names"
)

// definitionsPath is where the API server has CustomResourceDefinitions.
const definitionsPath = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"

// metadataOnly asks for the metadata of an object: a definition has up to 300 kB.
const metadataOnly = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"

// install makes the definitions that are missing or older, and waits until the API server serves the kinds.
func (c *controller) install(ctx context.Context) error {
	list, err := api.Definitions(c.o.Channel)
	if err != nil {
		return err
	}
	c.experimental.Store(false)
	for _, d := range list {
		if err := c.define(ctx, &d); err != nil {
			return fmt.Errorf("definition of %s: %w", d.Name, err)
		}
	}
	one := metav1.ListOptions{Limit: 1}
	_, err = c.api.Classes().List(ctx, one)
	_, err2 := c.api.Gateways("").List(ctx, one)
	_, err3 := c.api.Routes("").List(ctx, one)
	_, err4 := c.api.Grants("").List(ctx, one)
	return errors.Join(err, err2, err3, err4)
}

// features returns the features that are served with the installed definitions.
func (c *controller) features() []gwv1.SupportedFeature {
	return SupportedFeatures(c.experimental.Load())
}

// found notes what an installed definition is, by its annotations, nil if it is d: that of HTTPRoutes is what features are about.
func (c *controller) found(d *api.Definition, annotations map[string]string) {
	if d.Name != "httproutes."+gwv1.GroupName {
		return
	}
	channel, unsupported := d.Channel, ""
	if annotations != nil {
		channel, unsupported = api.Channel(annotations[api.ChannelAnnotation]), d.Unsupported(annotations)
	}
	c.experimental.Store(channel == api.Experimental)
	c.unsupported.Store(&unsupported)
	if unsupported != "" {
		c.o.Log.Warn("fairlead does not replace the definitions of the Gateway API: fields that it does not know have no effect",
			"why", unsupported)
	}
}

// define makes or replaces one definition. Where that is forbidden, an administrator must have made it.
func (c *controller) define(ctx context.Context, d *api.Definition) error {
	text, err := c.rest.Get().AbsPath(definitionsPath, d.Name).SetHeader("Accept", metadataOnly).DoRaw(ctx)
	if apierrors.IsNotFound(err) {
		err = c.rest.Post().AbsPath(definitionsPath).SetHeader("Content-Type", "application/json").Body([]byte(d.Object)).Do(ctx).Error()
		if apierrors.IsAlreadyExists(err) {
			return err // another server has it: look at that
		}
		if err == nil {
			c.found(d, nil)
		}
		return c.allowed(d, err)
	}
	if err != nil {
		return c.allowed(d, err)
	}
	have := metav1.PartialObjectMetadata{}
	if err := json.Unmarshal(text, &have); err != nil {
		return err
	}
	if !d.Replaces(have.Annotations) {
		c.found(d, have.Annotations)
		return nil
	}
	c.o.Log.Info("updating a definition of the Gateway API", "definition", d.Name, "to", d.Bundle)
	next := map[string]any{}
	if err := json.Unmarshal(d.Object, &next); err != nil {
		return err
	}
	next["metadata"].(map[string]any)["resourceVersion"] = have.ResourceVersion
	body, err := json.Marshal(next)
	if err != nil {
		return err
	}
	err = c.rest.Put().AbsPath(definitionsPath, d.Name).SetHeader("Content-Type", "application/json").Body(body).Do(ctx).Error()
	if err == nil {
		c.found(d, nil)
	} else { // it stays
		c.found(d, have.Annotations)
	}
	return c.allowed(d, err)
}

func (c *controller) allowed(d *api.Definition, err error) error {
	if apierrors.IsForbidden(err) {
		c.o.Log.Warn("no permission to install a definition; using the installed one", "definition", d.Name, "err", err)
		return nil
	}
	return err
}

// makeClass makes the GatewayClass, unless one has its name.
func (c *controller) makeClass(ctx context.Context) error {
	_, err := c.api.Classes().Create(ctx, &gwv1.GatewayClass{
		ObjectMeta: metav1.ObjectMeta{Name: names.ClassName}, Spec: gwv1.GatewayClassSpec{ControllerName: names.ControllerName},
	}, metav1.CreateOptions{})
	return made(err)
}

// makeIngressClass makes the IngressClass, unless one has its name.
func (c *controller) makeIngressClass(ctx context.Context) error {
	_, err := c.client.NetworkingV1().IngressClasses().Create(ctx, &networkingv1.IngressClass{
		ObjectMeta: metav1.ObjectMeta{Name: names.ClassName}, Spec: networkingv1.IngressClassSpec{Controller: names.IngressController},
	}, metav1.CreateOptions{})
	return made(err)
}

func made(err error) error {
	if apierrors.IsAlreadyExists(err) || apierrors.IsForbidden(err) {
		return nil
	}
	return err
}
