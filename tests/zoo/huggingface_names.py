"""Classes of Hugging Face's that are made from a tiny configuration alike, by kind of batch."""

ALIKE: dict[str, str] = {
    "causal": """
        AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM AriaTextForCausalLM BartForCausalLM
        BeamForCausalLM BertLMHeadModel BertGenerationDecoder BigBirdForCausalLM
        BigBirdPegasusForCausalLM BioGptForCausalLM BitNetForCausalLM BlenderbotForCausalLM
        BlenderbotSmallForCausalLM CamembertForCausalLM Cohere2ForCausalLM Cohere2MoeForCausalLM
        CpmAntForCausalLM CTRLLMHeadModel CwmForCausalLM Data2VecTextForCausalLM
        DeepseekV4ForCausalLM DiffLlamaForCausalLM DogeForCausalLM Dots1ForCausalLM
        ElectraForCausalLM Emu3ForCausalLM ErnieForCausalLM Ernie4_5ForCausalLM
        Ernie4_5_MoeForCausalLM Exaone4ForCausalLM ExaoneMoeForCausalLM FalconH1ForCausalLM
        FlexOlmoForCausalLM FlintForCausalLM FuyuForCausalLM Gemma3ForConditionalGeneration
        Gemma3ForCausalLM GlmForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM
        GotOcr2ForConditionalGeneration GPTBigCodeForCausalLM GPTNeoXJapaneseForCausalLM
        GptOssForCausalLM GraniteSWAForCausalLM GraniteMoeForCausalLM GraniteMoeSWAForCausalLM
        GraniteMoeSharedForCausalLM HeliumForCausalLM HrmTextForCausalLM HunYuanDenseV1ForCausalLM
        HunYuanMoEV1ForCausalLM HYV3ForCausalLM HYV4ForCausalLM HyperCLOVAXForCausalLM
        Inkling2ForCausalLM InklingForCausalLM Jais2ForCausalLM JambaForCausalLM JetMoeForCausalLM
        Kolibri1ForCausalLM LagunaForCausalLM Lfm2ForCausalLM Lfm3ForCausalLM Llama4ForCausalLM
        MarianForCausalLM MBartForCausalLM MegatronBertForCausalLM MellumForCausalLM
        MiMoV2FlashForCausalLM MiniMaxForCausalLM MiniMaxM2ForCausalLM MiniMaxM3VLForCausalLM
        MinistralForCausalLM Ministral3ForCausalLM MllamaForCausalLM ModernBertDecoderForCausalLM
        MoshiForCausalLM MossTranscribeDiarizeForConditionalGeneration MptForCausalLM MvpForCausalLM
        NanoChatForCausalLM NemotronForCausalLM OlmoForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM
        OlmoHybridForCausalLM OlmoeForCausalLM OpenAIGPTLMHeadModel PegasusForCausalLM
        PersimmonForCausalLM Phi3ForCausalLM Phi4MultimodalForCausalLM PhimoeForCausalLM
        PLBartForCausalLM ProphetNetForCausalLM Qwen2MoeForCausalLM Qwen3_5ForCausalLM
        Qwen3_5MoeForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM RecurrentGemmaForCausalLM
        RemBertForCausalLM RobertaForCausalLM RobertaPreLayerNormForCausalLM RoCBertForCausalLM
        RoFormerForCausalLM RwkvForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM
        SolarOpenForCausalLM TrOCRForCausalLM VaultGemmaForCausalLM WhisperForCausalLM
        XGLMForCausalLM XLMWithLMHeadModel XLMRobertaForCausalLM XLMRobertaXLForCausalLM
        XLNetLMHeadModel xLSTMForCausalLM
    """,
    "masked": """
        BigBirdForMaskedLM Data2VecTextForMaskedLM DebertaForMaskedLM ErnieForMaskedLM
        EsmForMaskedLM EuroBertForMaskedLM FlaubertWithLMHeadModel FunnelForMaskedLM GteForMaskedLM
        IBertForMaskedLM JinaEmbeddingsV3ForMaskedLM LayoutLMForMaskedLM LongformerForMaskedLM
        MegatronBertForMaskedLM MobileBertForMaskedLM ModernVBertForMaskedLM MraForMaskedLM
        MvpForConditionalGeneration NomicBertForMaskedLM NystromformerForMaskedLM RemBertForMaskedLM
        RobertaPreLayerNormForMaskedLM RoCBertForMaskedLM TapasForMaskedLM UltrabertForMaskedLM
        UltraVBertForMaskedLM XLMRobertaXLForMaskedLM YosoForMaskedLM
    """,
    "encoder-decoder": """
        AudioFlamingo3ForConditionalGeneration BigBirdPegasusForConditionalGeneration
        BlenderbotSmallForConditionalGeneration EncoderDecoderModel FSMTForConditionalGeneration
        GlmAsrForConditionalGeneration GraniteSpeechForConditionalGeneration
        GraniteSpeechPlusForConditionalGeneration LEDForConditionalGeneration
        M2M100ForConditionalGeneration NllbMoeForConditionalGeneration
        PegasusXForConditionalGeneration PLBartForConditionalGeneration
        ProphetNetForConditionalGeneration Qwen2AudioForConditionalGeneration
        Qwen3ASRForConditionalGeneration SeamlessM4TForTextToText SeamlessM4Tv2ForTextToText
        T5GemmaForConditionalGeneration T5Gemma2ForConditionalGeneration
        UMT5ForConditionalGeneration VoxtralForConditionalGeneration
    """,
    "pixels": """
        CLIPForImageClassification Data2VecVisionForImageClassification
        DeiTForImageClassificationWithTeacher Dinov2WithRegistersForImageClassification
        FocalNetForImageClassification IJepaForImageClassification MetaClip2ForImageClassification
        MobileNetV1ForImageClassification MobileNetV2ForImageClassification
        MobileViTForImageClassification PoolFormerForImageClassification
        PPLCNetForImageClassification RegNetForImageClassification SiglipForImageClassification
        SwiftFormerForImageClassification ViTMSNForImageClassification
        MobileNetV2ForSemanticSegmentation MobileViTForSemanticSegmentation
        DeiTForMaskedImageModeling FocalNetForMaskedImageModeling ViTForMaskedImageModeling
    """,
    "speech": """
        Data2VecAudioForSequenceClassification HubertForSequenceClassification
        SEWForSequenceClassification SEWDForSequenceClassification
        UniSpeechForSequenceClassification UniSpeechSatForSequenceClassification
        Wav2Vec2ForSequenceClassification Wav2Vec2ConformerForSequenceClassification
        WavLMForSequenceClassification Data2VecAudioForCTC HubertForCTC SEWForCTC SEWDForCTC
        UniSpeechForCTC UniSpeechSatForCTC Wav2Vec2ForCTC Wav2Vec2ConformerForCTC WavLMForCTC
    """,
}
