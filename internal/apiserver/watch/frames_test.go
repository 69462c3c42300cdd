package watch

import (
	"bytes"
	"errors"
	"io"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"

	"github.com/fairlead/fairlead/internal/registry"
)

// countedWriter counts writes, and fails after so many bytes where limit is above 0.
type countedWriter struct {
	bytes.Buffer
	writes, limit int
}

// Write writes p.
func (w *countedWriter) Write(p []byte) (int, error) {
	w.writes++
	if w.limit > 0 && w.Len()+len(p) > w.limit {
		return 0, errors.New("full")
	}
	return w.Buffer.Write(p)
}

// protobufFramer returns the framer of watches in protobuf.
func protobufFramer(t *testing.T) runtime.Framer {
	info, ok := runtime.SerializerInfoForMediaType(WholeFrames{registry.Codecs}.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	if !ok {
		t.Fatal("no protobuf")
	}
	return info.StreamSerializer.Framer
}

// An event is one write, and the bytes are those of the library.
func TestFramesAreWhole(t *testing.T) {
	t.Parallel()
	var got, want countedWriter
	ours, theirs := protobufFramer(t).NewFrameWriter(&got), protobuf.LengthDelimitedFramer.NewFrameWriter(&want)
	sizes := []int{0, 1, 2400, wholeFrame, wholeFrame + 1, 1 << 20, 3}
	for _, size := range sizes {
		event := bytes.Repeat([]byte{byte(size)}, size)
		for _, w := range []io.Writer{ours, theirs} {
			if n, err := w.Write(event); n != size || err != nil {
				t.Fatalf("%d bytes: %d, %v", size, n, err)
			}
		}
	}
	if !bytes.Equal(got.Bytes(), want.Bytes()) {
		t.Error("the frames differ from the library's")
	}
	if most := len(sizes) + 2; got.writes != most { // the two large ones are not copied
		t.Errorf("%d writes, want %d", got.writes, most)
	}
}

// A frame that is not written to the end is an error.
func TestFramesFail(t *testing.T) {
	t.Parallel()
	for _, size := range []int{100, wholeFrame + 100} {
		w := protobufFramer(t).NewFrameWriter(&countedWriter{limit: 50})
		if n, err := w.Write(make([]byte, size)); n != 0 || err == nil {
			t.Errorf("%d bytes: %d, %v", size, n, err)
		}
	}
}

// Other formats, and the library's own serializers, stay as they are.
func TestFramesOfOthers(t *testing.T) {
	t.Parallel()
	ours := WholeFrames{registry.Codecs}.SupportedMediaTypes()
	for i, before := range registry.Codecs.SupportedMediaTypes() {
		changed := before.MediaType == runtime.ContentTypeProtobuf
		if got := ours[i]; got.MediaType != before.MediaType || (got.StreamSerializer == before.StreamSerializer) == changed {
			t.Errorf("%s is served as %s", before.MediaType, got.MediaType)
		}
		if before.StreamSerializer == nil {
			continue // YAML has no watches
		}
		if _, ok := before.StreamSerializer.Framer.(wholeFramer); ok {
			t.Errorf("%s: the serializer of others was changed", before.MediaType)
		}
	}
}
