package backend

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/options/encryptionconfig"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"

	"github.com/fairlead/fairlead/internal/apiserver/store"
)

// lookTimeout bounds the look for objects that cannot be decrypted.
const lookTimeout = 10 * time.Second

// encryption holds the encryption of each kind in etcd; a kind that the
// configuration does not name is not encrypted.
type encryption struct {
	encryptionconfig.StaticTransformers
	file string
}

// Encrypt reads the encryption of file, "" for none, and connects to its key services
// until ctx ends; their health becomes part of the server's.
func (b *Backend) Encrypt(ctx context.Context, file string, c *genericapiserver.Config) error {
	if file == "" {
		return nil
	}
	config, err := encryptionconfig.LoadEncryptionConfig(ctx, file, false, c.APIServerID)
	if err != nil {
		return fmt.Errorf("--encryption-provider-config %s: %w", file, err)
	}
	c.AddHealthChecks(config.HealthChecks...)
	b.encryption = &encryption{config.Transformers, file}
	return nil
}

// transformer returns the encryption of a kind, nil for none.
func (e *encryption) transformer(gr schema.GroupResource) value.Transformer {
	if e == nil {
		return nil
	}
	return e.TransformerForResource(gr)
}

// CheckReadable returns an error that names the kind and the flag if kept has objects that the encryption cannot read. A
// server with such objects would not become ready. It looks at every object,
// since the encrypted ones may be the last of many, as far as lookTimeout allows.
func (b *Backend) CheckReadable(ctx context.Context, kept *store.Store) error {
	type written struct {
		kind schema.GroupResource
		by   store.Encryption
	}
	looked := map[written]bool{}
	look, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	var unreadable error
	err := kept.Values(look, b.config.Prefix, func(kind schema.GroupResource, key string, text []byte) error {
		w := written{kind, store.EncryptionOf(text)}
		if looked[w] {
			return nil
		}
		looked[w] = true
		unreadable = b.encryption.read(look, kind, w.by, key, text)
		return unreadable
	})
	switch {
	case unreadable != nil:
		return unreadable
	case ctx.Err() != nil:
		return ctx.Err()
	case look.Err() != nil:
		return nil // a slow etcd or key service is no reason not to start
	case err != nil:
		return fmt.Errorf("cannot look for encrypted objects in etcd: %w", err)
	}
	return nil
}

// read returns why a value cannot be read.
func (e *encryption) read(ctx context.Context, kind schema.GroupResource, by store.Encryption, key string, text []byte) error {
	plain := by == store.Encryption{}
	if e == nil {
		if plain {
			return nil
		}
		return fmt.Errorf("there are encrypted %s in etcd (%s): start the server with --encryption-provider-config FILE, "+
			"the EncryptionConfiguration with which they were written", kind, by)
	}
	_, _, err := e.TransformerForResource(kind).TransformFromStorage(ctx, text, value.DefaultContext(key))
	switch {
	case err == nil:
		return nil
	case plain:
		return fmt.Errorf("--encryption-provider-config %s cannot read the %s in etcd that are not encrypted: "+
			"add the provider \"identity: {}\" behind the others of %[2]s", e.file, kind)
	case by.Provider == "kms" && !lacksProvider(err):
		return nil // the key service may be away; the health checks show that
	}
	return fmt.Errorf("--encryption-provider-config %s cannot decrypt the %s in etcd (%s): %w; "+
		"add the provider and the key with which they were written, behind the first provider of %[2]s", e.file, kind, by, err)
}

// lacksProvider reports whether an error of decryption is that of a kind without a provider for the value. The library
// has no value for one of the two.
func lacksProvider(err error) bool {
	_, _, encrypted := identity.NewEncryptCheckTransformer().TransformFromStorage(context.Background(), []byte("k8s:enc:"), nil)
	return errors.Is(err, encrypted) || err.Error() == "no matching prefix found"
}
