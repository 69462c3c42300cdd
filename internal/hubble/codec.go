package hubble

import (
	"fmt"

	"google.golang.org/grpc/encoding"
	protocodec "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// maxParts bounds the fields of a request, in all of its messages: an empty filter has two bytes, and decoded several hundred.
const maxParts = 4 * maxFilterValues

// codec decodes requests with a bounded number of fields.
type codec struct{ encoding.CodecV2 }

func newCodec() codec { return codec{encoding.GetCodecV2(protocodec.Name)} }

// Unmarshal is part of encoding.CodecV2.
func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	if m, ok := v.(proto.Message); ok {
		if err := bounded(data.Materialize(), m); err != nil {
			return err
		}
	}
	return c.CodecV2.Unmarshal(data, v)
}

// bounded returns an error if the encoded message m has too many fields.
func bounded(text []byte, m proto.Message) error {
	if left := count(text, m.ProtoReflect().Descriptor(), maxParts); left < 0 {
		return fmt.Errorf("the request has more than %d fields and values", maxParts)
	}
	return nil
}

// count takes the number of fields in an encoded message, also in messages inside of it, from left, and returns the rest: less than 0
// if there are more. It ends where the text cannot be decoded.
func count(text []byte, d protoreflect.MessageDescriptor, left int) int {
	for len(text) > 0 && left >= 0 {
		number, kind, n := protowire.ConsumeTag(text)
		if n < 0 {
			return left
		}
		size := protowire.ConsumeFieldValue(number, kind, text[n:])
		if size < 0 {
			return left
		}
		left--
		if f := d.Fields().ByNumber(number); f != nil && f.Message() != nil && kind == protowire.BytesType {
			if inner, m := protowire.ConsumeBytes(text[n:]); m > 0 {
				left = count(inner, f.Message(), left)
			}
		}
		text = text[n+size:]
	}
	return left
}
